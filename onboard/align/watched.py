"""Our model's own calls, noted as the reference's are, so that both can be looked at side by side."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dayzero.onboard.oracle.calls import Call, floats
from dayzero.onboard.structure.loops import by_use, visits

_NEVER = 2**62  # the order of a call that did not end


@dataclass
class OurCall(Call):
    """A call of a module of ours. began: its place among all events, as `order` is of its end. A call that did not end
    has no output."""

    began: int = 0

    @property
    def read(self) -> list[Tensor]:
        """Every floating-point tensor that it was handed."""
        return floats(self.args)

    @property
    def given(self) -> Tensor | None:
        """The first tensor that it gave, of a layer that hands on what was kept the stream; None where it did not."""
        if isinstance(self.output, tuple) and isinstance(self.args[0], tuple):
            return self.output[-1]
        return next(iter(floats(self.output)), None)

    @property
    def stream(self) -> Tensor:
        """What a layer reads, without what was kept."""
        return self.args[0][-1] if isinstance(self.args[0], tuple) else self.args[0]


@dataclass
class Seen:
    """One pass of our model: the calls by module path; the logits, or why there are none."""

    calls: dict[str, OurCall] = field(default_factory=dict)
    logits: Tensor | None = None
    stopped: str = ""

    def visit(self, path: str, number: int) -> OurCall | None:
        """That run of the module, from 0; None where it did not come to it."""
        every = visits(self.calls[path]) if path in self.calls else []
        return every[number] if number < len(every) else None  # type: ignore[return-value]

    def during(self, call: OurCall) -> dict[str, OurCall]:
        """All calls that began and ended within this one, by path; the second of a module under "path@2" and so on."""
        every = sorted(self._all(), key=lambda one: one.began)
        return by_use(one for one in every if call.began < one.began < call.order)  # type: ignore[return-value]

    def _all(self) -> list[OurCall]:
        return list(itertools.chain.from_iterable(map(visits, self.calls.values())))  # type: ignore[arg-type]


def watched(model: nn.Module, ids: Tensor) -> Seen:
    """Our model on documents [B, S]."""
    return watched_while(model, lambda: model(ids.flatten(), torch.arange(0, ids.numel() + 1, ids.shape[1])))


def watched_while(model: nn.Module, run: Callable[[], Any]) -> Seen:
    """What `run` calls of our model; what it gives counts as logits."""
    seen, handles, clock = Seen(), [], itertools.count()
    running: dict[int, OurCall] = {}
    for path, module in model.named_modules():

        def before(module: nn.Module, args: Any, path: str = path) -> None:
            call = OurCall(path, module, args, {}, None, order=_NEVER, began=next(clock))
            running[id(module)] = call
            if path in seen.calls:
                seen.calls[path].later.append(call)
            else:
                seen.calls[path] = call

        def after(module: nn.Module, args: Any, output: Any) -> None:
            call = running.pop(id(module))
            call.output, call.order = output, next(clock)

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            seen.logits = run()
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
        seen.stopped = " ".join(str(error).split())[:200]
    finally:
        for handle in handles:
            handle.remove()
    return seen
