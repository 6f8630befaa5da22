"""Hand-written operators of a package beside the lifted classes that they stand for, on the package's small model."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.runtime.nn import Context, Lifted
from dayzero.runtime.nn.lifted_operator import beside
from dayzero.runtime.nn.lifted_source import classes_of
from dayzero.runtime.spec import ModelSpec

SMALL = "tests/small.json"  # the specification of a small model of the same kind
LENGTHS = (9, 1, 14)  # of the documents that it reads
_GAINS = (1.0, 20.0)  # on what the classes read
_SEED = 0


def differences(folder: Path, names: list[str]) -> dict[str, float]:
    """Worst relative errors by "CLASS: what": outputs, what is left for later layers, input gradients and parameter
    gradients, in float64. folder: of the package; names: of its operators for lifted classes.

    Raises RuntimeError where a custom operator does not run.
    """
    spec = ModelSpec.model_validate_json((folder / SMALL).read_text(encoding="utf-8"))
    operators = vars(beside(str(folder / "model.py"), names))
    lifted = spec.build(classes_of((folder / "lifted.py").read_text(encoding="utf-8"))).double()
    custom = spec.build(operators).double()
    generator = torch.Generator().manual_seed(_SEED)
    with torch.no_grad():
        for parameter in lifted.parameters():
            if parameter.is_floating_point():
                noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
                parameter.copy_(noise * parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 1 + 0.3 * noise)
            else:
                parameter.zero_()
    custom.load_state_dict(lifted.state_dict())
    found: dict[str, float] = {}
    for path, seen in _seen(lifted, spec.tokens, generator).items():
        name = type(lifted.get_submodule(path).module).__name__
        for gain in _GAINS:
            wanted, got = (
                _run(model.get_submodule(path), seen, gain)  # type: ignore[arg-type]
                for model in (lifted, custom)
            )
            for what, value in wanted.items():
                error = _relative(got[what], value)
                found[f"{name}: {what}"] = max(found.get(f"{name}: {what}", 0.0), error)
    return found


@dataclass(frozen=True)
class _Seen:
    """The arguments of one call of a `Lifted` block."""

    inputs: list[Tensor]
    context: Context


def _seen(model: nn.Module, vocabulary: int, generator: torch.Generator) -> dict[str, _Seen]:
    """Path -> the first call of every `Lifted` block in a pass over packed documents."""
    found: dict[str, _Seen] = {}

    paths = {module: path for path, module in model.named_modules() if isinstance(module, Lifted)}

    def enter(module: nn.Module, args: tuple[Any, ...]) -> None:
        *inputs, context = args
        found.setdefault(paths[module], _Seen([held.detach() for held in inputs], _own(context)))  # type: ignore[index]

    handles = [module.register_forward_pre_hook(enter) for module in paths]
    ids = torch.randint(0, vocabulary, (sum(LENGTHS),), generator=generator)
    try:
        with torch.no_grad():
            model(ids, torch.tensor([0, *LENGTHS]).cumsum(0))
    finally:
        for handle in handles:
            handle.remove()
    return found


def _own(context: Context) -> Context:
    return replace(context, shared=dict(context.shared))


def _run(block: Lifted, seen: _Seen, gain: float) -> dict[str, Tensor]:
    """All that the block gives, and gradients of a weighted sum of what of it is floating-point."""
    context = _own(seen.context)
    inputs = [(held * gain).requires_grad_(True) for held in seen.inputs]
    given = {"output": block(*inputs, context)}
    given |= {f"{name} left": context.shared[name] for name in block.leaves}
    trained = {name: parameter for name, parameter in block.named_parameters() if parameter.requires_grad}
    generator = torch.Generator().manual_seed(_SEED)
    total = 0.0 * inputs[0].sum()  # has gradients, of zero, where what is given has none
    for value in given.values():
        if value.requires_grad:
            total = total + (value * torch.randn(value.shape, generator=generator, dtype=torch.float64)).sum()
    wanted = [*inputs, *trained.values()]
    grads = torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)
    names = [*(f"gradient of input {place}" for place in range(len(inputs))), *(f"gradient of {n}" for n in trained)]
    return {name: value.detach() for name, value in given.items()} | dict(zip(names, grads, strict=True))


def _relative(got: Tensor, wanted: Tensor) -> float:
    """||got - wanted|| / ||wanted||; infinite for NaN or another shape or dtype."""
    if got.shape != wanted.shape or got.dtype != wanted.dtype:
        return float("inf")
    miss, size = (float(torch.linalg.vector_norm(held.double())) for held in (got.double() - wanted.double(), wanted))
    if miss != miss or size != size:
        return float("inf")
    return miss / size if size else (0.0 if miss == 0 else float("inf"))
