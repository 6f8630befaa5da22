"""What a layer computes from the input of one of its children to the output of a later one, where only something
narrower than the stream passes between them: a gate on what the layer is handed, spelt out in the layer itself."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from dayzero.onboard.oracle.calls import Call, floats, same
from dayzero.onboard.prove.trace import forget


@dataclass
class ChainCall(Call):
    """A part of a layer's own code as a function of what its first child reads. The module and its arguments are the
    layer's, the output is the last child's. first, last: paths of these, relative to the layer."""

    first: str = ""
    last: str = ""
    read: Tensor | None = None

    @property
    def name(self) -> str:
        """Relative to the layer."""
        return f"{self.first}-{self.last}"

    @property
    def hidden(self) -> Tensor:
        assert self.read is not None
        return self.read

    def replay(self, hidden: Tensor) -> Tensor:
        def enter(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            forget()
            read = floats((args, kwargs))[0]
            swapped = {name: hidden if value is read else value for name, value in kwargs.items()}
            return tuple(hidden if value is read else value for value in args), swapped

        def leave(module: Any, args: tuple, output: Any) -> None:
            raise _Left(output)

        handles = [
            self.module.get_submodule(self.first).register_forward_pre_hook(enter, with_kwargs=True),
            self.module.get_submodule(self.last).register_forward_hook(leave),
        ]
        try:
            self.replay_exactly(self.args, self.kwargs)
        except _Left as left:
            return self._result(left.output)
        finally:
            for handle in handles:
                handle.remove()
        raise RuntimeError(f"{self.path} does not run {self.last}")


class _Left(Exception):
    """The last child has run; the rest of the layer need not."""

    def __init__(self, output: Any):
        super().__init__()
        self.output = output


def chain_to(calls: Mapping[str, Call], layer: str, last: str) -> ChainCall | None:
    """The shortest chain that ends with the layer's child `last` and depends on nothing but what its first child reads
    and what the layer is handed beside the stream; None where there is none."""
    whole, end = calls[layer], calls[f"{layer}.{last}"]
    width = whole.result.shape[-1]
    names = list(calls)
    for name in reversed(names[: names.index(f"{layer}.{last}")]):
        first, call = name.removeprefix(f"{layer}."), calls[name]
        if not name.startswith(f"{layer}.") or "." in first or not call.has_stream or call.later:
            continue
        narrows = call.result.shape[:-1] == call.hidden.shape[:-1] and call.result.shape[-1] < width
        if call.hidden.shape == whole.hidden.shape and narrows:
            held = (whole.path, whole.module, whole.args, whole.kwargs, end.output)
            chain = ChainCall(*held, first=first, last=last, read=call.hidden)
            if _stands_alone(chain, whole):
                return chain
    return None


def chain_at(calls: Mapping[str, Call], path: str) -> ChainCall | None:
    """The chain with this name, after its layer's path; None where it names none."""
    layer, _, name = path.rpartition(".")
    _, dash, last = name.partition("-")
    found = chain_to(calls, layer, last) if dash and layer in calls and f"{layer}.{last}" in calls else None
    return found if found is not None and found.name == name else None


def _stands_alone(chain: ChainCall, layer: Call) -> bool:
    """Whether the chain gives the same whatever the layer reads, and something else for what its first child reads."""
    wave = 0.1 * torch.cos(torch.arange(layer.hidden.numel())).reshape(layer.hidden.shape)
    moved = layer.hidden + wave
    args, kwargs = layer.arguments(lambda value: moved if value is layer.hidden else value)
    with torch.no_grad():
        kept = replace(chain, args=args, kwargs=kwargs).replay(chain.hidden)
        return same(kept, chain.result) and not same(chain.replay(chain.hidden + wave), chain.result)
