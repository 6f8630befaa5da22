"""How far a reference gets with a config: refused, built, run, or the same model as the real one.

Where it stops is a measure: of two configs that both fail, the one whose model executes more before it fails is nearer
to one that works. This is what the search for small sizes climbs.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from dayzero.onboard.oracle.reference import UnknownArchitecture, build, redraw, run
from dayzero.onboard.shrink.layers import layer_list
from dayzero.runtime.errors import InputError

SEQUENCE = 24  # tokens of a proof's documents: more than the window, many more than top_k
STAGES = ("refused", "not built", "another model", "not run", "not finite", "runs")
Stage = Literal["refused", "not built", "another model", "not run", "not finite", "runs"]
FAILURES = (
    InputError, UnknownArchitecture, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError,
    AssertionError, ZeroDivisionError, NotImplementedError,
)  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """stage: where it ended. steps: parameters made, or operators executed, before that. message: what was said.
    again: whether one of its layers ran more than once."""

    stage: Stage
    steps: int = 0
    message: str = ""
    again: bool = False

    @property
    def progress(self) -> tuple[int, int]:
        return STAGES.index(self.stage), self.steps


class _Counted(TorchFunctionMode):
    steps = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.steps += 1
        return func(*args, **(kwargs or {}))


def trial(config: Mapping[str, Any], same: Callable[[nn.Module], str] = lambda model: "") -> Trial:
    """Builds the model of a config and runs it once. same: says what is different about a model from the one that is
    wanted, nothing if it is that one."""
    made = 0

    def count(module: nn.Module, name: str, parameter: Any) -> None:
        nonlocal made
        made += 1

    handle = register_module_parameter_registration_hook(count)
    try:
        model, _ = build(config)
    except FAILURES as error:
        stage: Stage = "not built" if made else "refused"
        return Trial(stage, made, _said(error))
    finally:
        handle.remove()
    try:
        difference = same(model)
    except FAILURES as error:
        difference = _said(error)
    if difference:
        return Trial("another model", 0, difference)
    counted = _Counted()
    runs: Counter[nn.Module] = Counter()
    try:
        for layer in layer_list(model):
            layer.register_forward_hook(lambda module, *_: runs.update([module]))
        generator = torch.Generator().manual_seed(0)
        redraw(model, generator)
        vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        ids = torch.randint(min(3, vocabulary - 1), vocabulary, (2, SEQUENCE), generator=generator)
        with torch.no_grad(), counted:
            logits = run(model, ids)
    except FAILURES as error:
        return Trial("not run", counted.steps, _said(error))
    if not torch.isfinite(logits).all():
        return Trial("not finite", counted.steps, "the logits are not finite")
    return Trial("runs", counted.steps, again=any(times > 1 for times in runs.values()))


def _said(error: Exception) -> str:
    text = str(error.found) if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
    return " ".join(text.split())[:300]
