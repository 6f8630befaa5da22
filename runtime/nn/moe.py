"""A routed mixture of experts: route, permute, (exchange,) compute, combine."""

from torch import Tensor, nn
from torch.distributed import ProcessGroup

from .activation import Activation
from .expert_parallel import exchange_experts
from .experts import Experts
from .permutation import combine, expert_order, permute
from .router import Router, Score


class MixtureOfExperts(nn.Module):
    """x: [T, H] -> [T, H], the weighted sum over each token's top_k experts.

    `expert_group` is set by parallelisation: the ranks that share the experts, None when each rank has them all.
    `expert_counts` [E] int64 holds the token copies per expert of the last forward pass on this rank.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        width: int,
        act: Activation,
        score: Score = "softmax",
        renormalise: bool = False,
        renormalise_eps: float = 0.0,
        scale: float = 1.0,
    ):
        super().__init__()
        self.router = Router(hidden, experts, top_k, score, renormalise, renormalise_eps, scale)
        self.experts = Experts(experts, hidden, width, act)
        self.expert_group: ProcessGroup | None = None
        self.expert_counts: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        weights, index = self.router(x)
        order, inverse, counts = expert_order(index, self.router.experts)
        self.expert_counts = counts
        copies = permute(x, order, inverse, self.router.top_k)
        if self.expert_group is None:
            results = self.experts(copies, counts)
        else:
            results = exchange_experts(self.experts, copies, counts, self.expert_group)
        return combine(results, order, inverse, weights)
