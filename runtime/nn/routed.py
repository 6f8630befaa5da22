"""What every layer has whose tokens choose experts, whatever the experts compute."""

import torch
from torch import Tensor, nn

from dayzero.runtime.recompute import computed_again

from .capacity import Capacity, within_capacity
from .expert_parallel import Dispatcher, Exchange
from .experts import Experts
from .router import Routing


class Routed(nn.Module):
    """A router and its experts.

    `capacity` limits how many copies an expert takes; None for no limit.
    `exchange` is set by parallelisation: the ranks that share the experts, None when each rank has them all.
    `expert_counts` [E] int64 holds the copies of this rank's tokens per expert since they were last taken, each once: a
    layer of a loop has those of all its passes, and what is computed again counts nothing.
    """

    def __init__(self, router: Routing, experts: Experts):
        super().__init__()
        if router.experts < experts.experts:
            raise ValueError(f"a router over {router.experts} classes cannot reach {experts.experts} experts")
        self.router, self.experts = router, experts
        self.exchange: Exchange | None = None
        self.capacity: Capacity | None = None
        self.expert_counts: Tensor | None = None

    def rows_of_a_token(self, ranks: int, dispatcher: Dispatcher = "alltoall") -> float:
        """How many rows as wide as `experts.hidden` a token sends to the ranks that share the experts, on average, if
        each rank is as likely for each of its choices."""
        if dispatcher == "allgather":
            return ranks
        return self.router.top_k if dispatcher == "fused" else ranks * (1 - (1 - 1 / ranks) ** self.router.top_k)

    def take_counts(self) -> Tensor | None:
        """`expert_counts`, which begin anew."""
        counts, self.expert_counts = self.expert_counts, None
        return counts

    def _count(self, index: Tensor) -> None:
        if not computed_again():
            counts = torch.bincount(index.flatten(), minlength=self.router.experts)[: self.experts.experts]
            self.expert_counts = counts if self.expert_counts is None else self.expert_counts + counts

    def _limited(self, index: Tensor, weights: Tensor) -> tuple[int | None, Tensor]:
        """(copies that an expert takes, or None for all; the index without those over it)."""
        if self.capacity is None:
            return None, index
        limit = self.capacity.of(index.shape[0], index.shape[1], self.experts.experts)
        return limit, within_capacity(index, weights, self.experts.experts, limit)
