"""Where proposers stopped: what of a module had an explanation and what had none, for a person who writes the block.

Only a site that listens (`Site.stops` is a list) is told; the search itself never asks.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dayzero.onboard.oracle.reference import state_of

_SHOWN = 6  # names that a line has room for


@dataclass(frozen=True)
class Stop:
    """A block that the module is like, and what of the module it has no explanation for: what -> names of the module's
    tensors that it is made of, none where that is not known. path: of the module inside that computes it, "" where it
    is none."""

    block: str
    open: Mapping[str, tuple[str, ...]]
    path: str = ""

    @property
    def text(self) -> str:
        """One line; what is partly made of the same tensors stands together."""
        groups: list[tuple[list[str], list[str]]] = []
        for what, names in self.open.items():
            found = next((group for group in groups if set(group[1]) & set(names)), None)
            if found is None:
                groups.append(([what], list(names)))
            else:
                found[0].append(what)
                found[1].extend(name for name in names if name not in found[1])
        said = [" and ".join(whats) + (f" (of {few(names)})" if names else "") for whats, names in groups]
        return f"like {self.block}, but for {'; '.join(said)}"


@dataclass(frozen=True)
class Cut:
    """A search that ended at its bound. left: candidates beyond it, which nobody tried."""

    bound: int
    left: int

    @property
    def text(self) -> str:
        return f"the search ended at its bound of {self.bound} candidates; {self.left} were left untried"


def few(names: tuple[str, ...] | list[str]) -> str:
    """Names of tensors, each of a module once, no more than a line has room for."""
    short = list(dict.fromkeys(name.removesuffix(".weight").removesuffix(".bias") for name in names))
    more = f" and {len(short) - _SHOWN} more" if len(short) > _SHOWN + 1 else ""
    return ", ".join(short[:_SHOWN] if more else short) + more


def made_of(module: nn.Module, measure: Callable[[], Mapping[str, Tensor]]) -> dict[str, set[str]]:
    """Names of the module's tensors that each value depends on: each is drawn anew in turn, and the values measured
    again. What is no longer measured, or has another shape, depends on it; all does where the module no longer runs."""
    generator = torch.Generator().manual_seed(0)
    usual = measure()
    found: dict[str, set[str]] = {what: set() for what in usual}
    for name, tensor in state_of(module).items():
        if not tensor.is_floating_point():
            continue
        held = tensor.clone()
        try:
            tensor.copy_(torch.randn(tensor.shape, generator=generator, dtype=torch.float64))
            changed = measure()
        except (RuntimeError, ValueError, LookupError):
            changed = {}
        finally:
            tensor.copy_(held)
        for what, value in usual.items():
            if what not in changed or not torch.equal(value, changed[what]):
                found[what].add(name)
    return found
