"""A second copy of the busiest experts, on another rank: half of their tokens go there.

The weights travel with every forward pass, and the gradients of the copy back to its owner, where they are summed: an
expert with two copies learns as one.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from .exchange import AllToAll, Flight, Waiting, land, leave
from .permutation import Compute


class Duplicates:
    """hosts: (expert, rank) pairs, at most one for an expert and never its own rank. Raises ValueError otherwise.

    A rank has `slots` places: its own experts, then the copies that it hosts.
    """

    def __init__(self, hosts: Sequence[tuple[int, int]], experts: int, ranks: int):
        self.own, self.ranks = experts // ranks, ranks
        if len({expert for expert, _ in hosts}) < len(hosts):
            raise ValueError(f"hosts {list(hosts)} give an expert more than one further copy")
        if any(expert // self.own == rank for expert, rank in hosts):
            raise ValueError(f"hosts {list(hosts)} give a rank a copy of its own expert")
        self.hosted = [sorted(expert for expert, rank in hosts if rank == host) for host in range(ranks)]
        self.more = max(map(len, self.hosted), default=0)
        self.slots = self.own + self.more
        first = [expert // self.own * self.slots + expert % self.own for expert in range(experts)]
        second = list(first)
        for host, guests in enumerate(self.hosted):
            for place, expert in enumerate(guests):
                second[expert] = host * self.slots + self.own + place
        self.table = torch.tensor([first, second])

    def place(self, index_TK: Tensor) -> Tensor:
        """[T, K]: where each copy goes: every second token to the second copy. What has no expert has no place."""
        token = torch.arange(index_TK.shape[0], device=index_TK.device).unsqueeze(1)
        experts, table = self.table.shape[1], self.table.to(index_TK.device)
        found = table[token % 2, index_TK.clamp(max=experts - 1)]
        return torch.where(index_TK < experts, found, self.ranks * self.slots)

    def compute(self, experts: nn.Module, group: ProcessGroup, waiting: Waiting, method: str = "compute") -> Compute:
        """compute(x, counts) over own experts and hosted copies, counts [slots].

        experts: a module with that method; its parameters are its own and stacked over experts, as within its call.
        """
        own = {name: _local(parameter) for name, parameter in experts.named_parameters()}
        if any("." in name for name in own):
            raise ValueError(f"experts with modules inside ({', '.join(own)}) cannot be duplicated")
        rank = group.rank()
        leaving = [[e for e in guests if e // self.own == rank] for guests in self.hosted]
        arriving = [[e for e in self.hosted[rank] if e // self.own == owner] for owner in range(self.ranks)]
        device = next(iter(own.values())).device
        chosen = torch.tensor([e % self.own for part in leaving for e in part], dtype=torch.int64, device=device)
        flat = torch.cat([parameter.index_select(0, chosen).flatten(1) for parameter in own.values()], 1)
        flight = Flight(AllToAll([len(part) for part in leaving], [len(part) for part in arriving], group), waiting)
        guests = land(leave(flat, flight), flight)
        guests = F.pad(guests, (0, 0, 0, self.more - guests.shape[0]))
        shapes = [parameter.shape[1:] for parameter in own.values()]
        parts = guests.split([shape.numel() for shape in shapes], 1)
        twin = _with_parameters(
            experts, {name: part.unflatten(1, shape) for name, part, shape in zip(own, parts, shapes, strict=True)}
        )

        def both(x: Tensor, counts: Tensor) -> Tensor:
            here = int(counts[: self.own].sum())
            mine = getattr(experts, method)(x[:here], counts[: self.own])
            return torch.cat((mine, getattr(twin, method)(x[here:], counts[self.own :])))

        return both


def _with_parameters(module: nn.Module, parameters: dict[str, Tensor]) -> nn.Module:
    """The module with other tensors for its parameters; everything else is shared."""
    twin = object.__new__(type(module))
    twin.__dict__ = {**module.__dict__, "_parameters": {**module._parameters, **parameters}}
    return twin


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
