"""Calls of modules that read the stream more than once: a gate between stream and branch, attention over depth, queries
and keys of their own inputs."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dayzero.onboard.oracle.calls import Call


@dataclass
class SeveralCall(Call):
    """A call as a function of several of its arguments, which stand side by side in `hidden`: [B, S, widths].

    places: positions of the arguments, or their names. Each is [B, S, H], or [B, S, n, H] for a stack of n values.
    """

    places: tuple[int | str, ...] = ()

    @property
    def inputs(self) -> list[Tensor]:
        return [self.args[place] if isinstance(place, int) else self.kwargs[place] for place in self.places]

    @property
    def hidden(self) -> Tensor:
        return torch.cat([held.flatten(2) for held in self.inputs], -1)

    def replay(self, hidden: Tensor) -> Tensor:
        args, kwargs = list(self.args), dict(self.kwargs)
        for place, held in zip(self.places, self._apart(hidden), strict=True):
            if isinstance(place, int):
                args[place] = held
            else:
                kwargs[place] = held
        return self._result(self.replay_exactly(tuple(args), kwargs))

    def split(self, hidden: Tensor) -> list[Tensor]:
        """[T, H] each; the values of a stack by themselves."""
        made: list[Tensor] = []
        for held in self._apart(hidden):
            made += held.flatten(0, 1).unbind(1) if held.ndim == 4 else [held.reshape(-1, held.shape[-1])]
        return made

    def _apart(self, hidden: Tensor) -> list[Tensor]:
        widths = [held.shape[2:].numel() for held in self.inputs]
        parts = hidden.split(widths, -1)
        return [part.reshape(held.shape) for part, held in zip(parts, self.inputs, strict=True)]


def several(call: Call, places: Sequence[int | str], joined: bool = False) -> SeveralCall:
    """The call as a function of the arguments at `places`. joined: all outputs matter."""
    held: dict[str, Any] = {name: getattr(call, name) for name in ("path", "module", "args", "kwargs", "output")}
    return SeveralCall(**held, joined=joined, places=tuple(places))


def top_level(call: Call) -> list[tuple[int | str, Tensor]]:
    """The floating-point tensors among the arguments themselves, in order, each with its place."""
    named = [*enumerate(call.args), *call.kwargs.items()]
    return [(place, value) for place, value in named if isinstance(value, Tensor) and value.is_floating_point()]
