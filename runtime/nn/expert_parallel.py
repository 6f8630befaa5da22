"""Expert parallelism: tokens travel to the ranks that hold their experts, and what those make of them travels back.

A token goes to a rank once, however many of its experts are there, and the rank sends one sum back: with 16 experts a
token on 4 ranks that is a quarter of the copies. Weights are therefore applied where the experts are.
Counts go first, so that every rank knows what it will get. Tokens go in parts: while one part is computed, the next
arrives and the one before returns. The backward pass does the same in reverse (see `exchange`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from . import fused_dispatch
from .capacity import padded
from .dispatch import Rows, every_row, local_slots, pack, rows_by_rank, unpack
from .duplicates import Duplicates
from .exchange import AllGather, AllToAll, Flight, Move, Waiting, land, leave
from .experts import Experts
from .permutation import Copies, collect, sorted_copies, through_experts

Dispatcher = Literal["alltoall", "allgather", "fused"]


@dataclass
class Exchange:
    """The ranks that share the experts of a layer, and how tokens get to them.

    Rank r of `group` holds experts r*E/R .. (r+1)*E/R - 1. dispatcher: alltoall sends a token where it is needed;
    allgather sends every token everywhere, which is less work for few ranks and many experts a token;
    fused uses the operators of an NPU (`fused_dispatch`), over a group of their own. alone: that group.
    parts: in how many tokens travel. dtype: of the experts' inputs where that is not the layer's.
    duplicates: second copies of experts, which may change from one forward pass to the next.
    """

    group: ProcessGroup
    dispatcher: Dispatcher = "alltoall"
    parts: int = 1
    dtype: torch.dtype | None = None
    waiting: Waiting = field(default_factory=Waiting)
    duplicates: Duplicates | None = None
    alone: ProcessGroup | None = None

    def depart(self, x: Tensor, weights: Tensor, index: Tensor, experts: int, capacity: int | None = None) -> "Journey":
        """Sends x [T, H] off. index [T, K] int64, E and more for no expert; weights: [T, K]; experts: E.

        capacity: copies for an expert from each rank, to which the experts' batches are padded; None to pad nothing.

        Every rank takes part, tokens or not. Raises ValueError if the experts do not divide evenly over the group, or
        if the operators of `fused` cannot take these tokens.
        """
        ranks = self.group.size()
        if experts % ranks:
            raise ValueError(f"{experts} experts do not divide over {ranks} expert-parallel ranks")
        x = x.to(self.dtype or x.dtype)
        slots = experts // ranks
        if self.duplicates is not None:
            slots, index = self.duplicates.slots, self.duplicates.place(index)
        make = {"alltoall": self._where_needed, "allgather": self._everywhere, "fused": self._fused}[self.dispatcher]
        cuts = self._cuts(x, index.shape[1])
        plans = make([index[cut] for cut in cuts], slots)
        weights = weights.to(x.dtype)
        parcels = [plan.depart(x[cut], weights[cut], self.waiting) for plan, cut in zip(plans, cuts, strict=True)]
        return Journey(self, parcels, None if capacity is None else self._largest(capacity, x.device) * ranks)

    def _cuts(self, x: Tensor, choices: int) -> list[slice]:
        tokens = x.shape[0]
        if self.dispatcher != "fused":
            bounds = [tokens * part // self.parts for part in range(self.parts + 1)]
            return [slice(*bounds[part : part + 2]) for part in range(self.parts)]
        ok, reason = fused_dispatch.supports(x, choices)
        if not ok:
            raise ValueError(f"the fused dispatcher cannot take these tokens: {reason}")
        step = fused_dispatch.TOKENS
        return [slice(first, first + step) for first in range(0, max(1, self._largest(tokens, x.device)), step)]

    def _largest(self, number: int, device: torch.device) -> int:
        most = torch.tensor(number, device=device)
        dist.all_reduce(most, dist.ReduceOp.MAX, group=self.group)
        return int(most)

    def _where_needed(self, parts: Sequence[Tensor], slots: int) -> list["Plan"]:
        ranks = self.group.size()
        rows = [rows_by_rank(slot, slots, ranks) for slot in parts]
        # To each rank, of each part: how many rows, and how many copies for each of its experts.
        sent = torch.stack([_counts(slot, each, slots, ranks) for slot, each in zip(parts, rows, strict=True)], 1)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        known = torch.stack((sent[..., 0], received[..., 0], received[..., 1:].sum(-1))).tolist()  # the one wait
        plans = []
        for part, (slot, each) in enumerate(zip(parts, rows, strict=True)):
            send, receive, copies = ([of_rank[part] for of_rank in kind] for kind in known)
            move = AllToAll(send, receive, self.group)
            aimed = local_slots(slot.index_select(0, each.token), each.rank, slots)
            plans.append(Plan(each, aimed, move, slots, sum(copies), received[:, part, 1:].sum(0)))
        return plans

    def _everywhere(self, parts: Sequence[Tensor], slots: int) -> list["Plan"]:
        heights, totals, counts = self._from_everywhere(parts, slots)
        move = AllGather(self.group)
        return [
            Plan(every_row(slot, height), slot, move, slots, total, counts[part], self.group.rank())
            for part, (slot, height, total) in enumerate(zip(parts, heights, totals, strict=True))
        ]

    def _fused(self, parts: Sequence[Tensor], slots: int) -> list["Plan"]:
        ranks, height = self.group.size(), fused_dispatch.TOKENS
        assert self.alone is not None
        _, totals, counts = self._from_everywhere(parts, slots)
        return [
            Plan(
                every_row(slot, height),
                slot,
                fused_dispatch.Dispatch(slot, ranks * slots, total, self.alone),
                slots,
                total,
                counts[part],
                self.group.rank(),
                copies=True,
            )
            for part, (slot, total) in enumerate(zip(parts, totals, strict=True))
        ]

    def _from_everywhere(self, parts: Sequence[Tensor], slots: int) -> tuple[list[int], list[int], Tensor]:
        """Of each part: the most tokens of a rank, copies for this rank, and [parts, slots] for each of its slots."""
        ranks, own = self.group.size(), self.group.rank()
        counts = [torch.bincount(slot.flatten(), minlength=ranks * slots)[: ranks * slots] for slot in parts]
        tokens = counts[0].new_tensor([slot.shape[0] for slot in parts])
        mine = torch.cat((tokens.unsqueeze(1), torch.stack(counts)), 1)
        every = mine.new_empty(ranks * mine.numel())
        dist.all_gather_into_tensor(every, mine.flatten(), group=self.group)
        every = every.view(ranks, *mine.shape)
        local = every[:, :, 1 + own * slots : 1 + (own + 1) * slots].sum(0)
        heights, totals = torch.stack((every[..., 0].amax(0), local.sum(1))).tolist()
        return heights, totals, local


def _counts(slot: Tensor, rows: Rows, slots: int, ranks: int) -> Tensor:
    """[R, 1 + slots]: rows to each rank, and copies for each of its slots."""
    copies = torch.bincount(slot.flatten(), minlength=ranks * slots)[: ranks * slots]
    return torch.cat((torch.bincount(rows.rank, minlength=ranks).unsqueeze(1), copies.view(ranks, slots)), 1)


@dataclass
class Plan:
    """One part of the tokens. slot [N, K]: of each row sent, among the receiver's, or among those of all ranks where
    `own`, this rank's number, is to sort them out on arrival. total, counts: copies that this rank will get. copies:
    whether a row comes for each of these, sorted by expert."""

    rows: Rows
    slot: Tensor
    move: Move
    slots: int
    total: int
    counts: Tensor
    own: int | None = None
    copies: bool = False

    def depart(self, x: Tensor, weights: Tensor, waiting: Waiting) -> "Parcel":
        there, home = Flight(self.move, waiting), Flight(self.move.reverse(), waiting)
        return Parcel(
            self, x.shape[0], weights.shape[1], there, home, leave(pack(x, weights, self.slot, self.rows), there)
        )


@dataclass
class Parcel:
    """A part that is under way: `travelling`, not to be read before it has landed."""

    plan: Plan
    tokens: int
    choices: int
    there: Flight
    home: Flight
    travelling: Tensor

    def compute(self, travelling: Tensor, through: Callable[[Tensor, Tensor, Copies], Tensor]) -> Tensor:
        """What goes home: one sum for each row."""
        plan = self.plan
        x, weights, slot = unpack(land(travelling, self.there), self.choices)
        if plan.own is not None:
            slot = local_slots(slot, plan.own, plan.slots)
        if plan.copies:
            slot = fused_dispatch.only_own(slot, plan.counts, plan.total)
        copies = sorted_copies(slot, plan.slots, plan.total)._replace(counts=plan.counts)
        return leave(through(x, weights, copies), self.home)

    def arrive(self, travelling: Tensor) -> Tensor:
        """[tokens, H]: the sums of all ranks, summed."""
        back = land(travelling, self.home)
        token = self.plan.rows.token
        if self.plan.own is not None:
            return back[: self.tokens]
        return collect(back, token, self.tokens)


class Journey:
    """Tokens on their way to the experts and back. height: rows to which each expert's batch is padded, or None."""

    def __init__(self, exchange: Exchange, parcels: list[Parcel], height: int | None):
        self.exchange, self.parcels, self.height = exchange, parcels, height

    def take(self) -> list[Tensor]:
        """What travels, for the one who computes: an argument of the experts' module, so that FSDP sees it."""
        return [parcel.travelling for parcel in self.parcels]

    def compute(self, experts: Experts, travelling: list[Tensor], method: str = "compute", **how) -> list[Tensor]:
        """The experts, part by part. method: of theirs. how: `weigh` and `norm` of `through_experts`."""
        done, exchange, compute = [], self.exchange, getattr(experts, method)
        if exchange.duplicates is not None:
            compute = exchange.duplicates.compute(experts, exchange.group, exchange.waiting, method)
        if self.height is not None:
            compute = padded(compute, self.height)
        for parcel, part in zip(self.parcels, travelling, strict=True):
            done.append(parcel.compute(part, lambda *rows: through_experts(compute, *rows, **how)))
        return done

    def arrive(self, travelling: list[Tensor]) -> Tensor:
        """[T, .], in the order in which tokens departed."""
        home = [parcel.arrive(part) for parcel, part in zip(self.parcels, travelling, strict=True)]
        return home[0] if len(home) == 1 else torch.cat(home)
