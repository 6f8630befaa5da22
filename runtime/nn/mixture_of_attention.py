"""A mixture of attention heads (Zhang et al. 2022, arXiv:2210.05144; JetMoE, Shen et al. 2024, arXiv:2404.07413)."""

from functools import partial

import torch
from torch import Tensor, nn

from .attend import attend
from .capacity import padded
from .context import Context
from .expert_parallel import Dispatcher
from .experts import Experts
from .linear import reset_linear
from .permutation import sorted_copies, through_experts
from .rotary import RotaryStyle, rotate
from .routed import Routed
from .router import Routing


class MixtureOfAttention(Routed):
    """x: [T, H] -> [T, H]. An expert is the first and the last projection of an attention; keys and values are shared.

        q_k = U_k x                       for each of the token's top_k experts k: G heads of size D
        y = sum_k w_k V_k attention(q_k, key x, value x) + bias
        head g of q_k attends to key and value head g; w: the router's weights.

    experts: U [E, G D, H] and V [E, H, G D], nothing between them. kv_heads: G. rotary: the pairs of channels of
    queries and keys that turn by the model's table number `table`, None for no positions. Each choice of a token is a
    row by itself, which travels to its expert twice where ranks share them.
    """

    uses_context = True
    context_parallel = True
    parallel_sequence = True  # nor are its rows gathered over tp
    lora_targets = ("key", "value")

    def __init__(
        self,
        router: Routing,
        experts: Experts,
        kv_heads: int,
        scale: float,
        rotary: RotaryStyle | None = "half",
        table: int = 0,
        bias: bool = False,
    ):
        super().__init__(router, experts)
        if experts.act is not None:
            raise ValueError(f"between the projections is attention, not {experts.act}: give experts without act")
        if experts.width % kv_heads:
            raise ValueError(f"experts of width {experts.width} do not divide into {kv_heads} heads")
        if router.experts != experts.experts or router.shared:
            raise ValueError(f"{experts.experts} experts need a router over as many classes, not {router.experts}")
        self.kv_heads, self.scale, self.table = kv_heads, scale, table
        self.rotary: RotaryStyle | None = rotary
        self.key = nn.Linear(experts.hidden, experts.width, bias=False)
        self.value = nn.Linear(experts.hidden, experts.width, bias=False)
        self.bias = nn.Parameter(torch.empty(experts.hidden)) if bias else None

    def rows_of_a_token(self, ranks: int, dispatcher: Dispatcher = "alltoall") -> float:
        """Each choice by itself: a row of the stream, then what its heads gathered."""
        rows = self.router.top_k * (1 + self.experts.width / self.experts.hidden)
        return ranks * rows if dispatcher == "allgather" else rows

    def reset_parameters(self, std: float) -> None:
        for linear in (self.key, self.value):
            reset_linear(linear, std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        weights, index = self.router(x, context)
        self._count(index)
        limit, aimed = self._limited(index, weights)
        height = limit if self.capacity is not None and self.capacity.pad else None
        attended = partial(self._attended, x=x, context=context)
        y = self.experts(x, None, partial(self._through, weights, aimed, height, attended))
        return y if self.bias is None else y + self.bias

    def _through(self, weights: Tensor, index: Tensor, height: int | None, attended, experts: Experts, x: Tensor):
        """Within one call of the experts, so that their parameters are gathered once."""
        choices = index.shape[1]
        routed = partial(self._routed, experts, index.reshape(-1, 1), height)
        query = routed("into", x.repeat_interleave(choices, 0), torch.ones_like(weights).reshape(-1, 1))
        rows = attended(query.unflatten(0, (-1, choices)))
        return routed("out_of", rows.flatten(0, 1), weights.reshape(-1, 1)).unflatten(0, (-1, choices)).sum(1)

    def _routed(
        self, experts: Experts, index: Tensor, height: int | None, method: str, rows: Tensor, weights: Tensor
    ) -> Tensor:
        """Each row through the projection of its expert, times its weight.  [M, .], index and weights [M, 1]."""
        count = experts.experts
        if self.exchange is not None:
            journey = self.exchange.depart(rows, weights, index, count, height)
            return journey.arrive(journey.compute(experts, journey.take(), method))
        compute = getattr(experts, method)
        total = index.numel() if self.capacity is None else None
        compute = compute if height is None else padded(compute, height)
        return through_experts(compute, rows, weights, sorted_copies(index, count, total))

    def _attended(self, query: Tensor, x: Tensor, context: Context) -> Tensor:
        """query: [T, K, G D] -> what the heads gather, [T, K, G D]."""
        key, value = (part.unflatten(-1, (self.kv_heads, -1)) for part in (self.key(x), self.value(x)))
        choices = query.shape[1]
        # All choices of a head read the same keys: they stand side by side.
        query = query.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2).flatten(1, 2)
        if self.rotary is not None:
            if self.table >= len(context.tables):
                raise ValueError("this attention rotates queries and keys, but the model has no such rotary tables")
            query, key = (rotate(part, *context.tables[self.table], self.rotary) for part in (query, key))
        attended = attend(query, key, value, context.lengths, self.scale)
        return attended.unflatten(1, (self.kv_heads, choices)).transpose(1, 2).flatten(2)
