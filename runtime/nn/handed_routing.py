"""Routing by one part of a layer for another: where the router reads something else than the experts do."""

import torch
from torch import Tensor, nn

from .context import Context
from .router import Routing

WEIGHTS, INDEX = "routing_weights", "routing_index"  # their names in Context.shared: [T, K] each


class LeaveRouting(nn.Module):
    """Routes for experts that come later in the layer, and leaves weights and index in `context.shared`.

    x: [T, H] -> the weights as a matrix [T, E], zero where an expert is not selected.
    """

    uses_context = True
    context_parallel = True
    parallel_rows = True  # looks at each token by itself

    def __init__(self, router: Routing):
        super().__init__()
        self.router = router

    def forward(self, x: Tensor, context: Context) -> Tensor:
        weights, index = self.router(x, context)
        context.shared[WEIGHTS], context.shared[INDEX] = weights, index
        return torch.zeros_like(weights[:, :1]).expand(-1, self.router.experts).scatter_add(1, index, weights)


class HandedRouting(Routing):
    """The router of a mixture that was routed by an earlier part of the layer (`LeaveRouting`); without parameters."""

    uses_context = True
    context_parallel = True
    parallel_rows = True  # looks at each token by itself

    def __init__(self, experts: int, top_k: int):
        super().__init__()
        self.experts, self.top_k = experts, top_k

    def forward(self, x: Tensor, context: Context | None = None) -> tuple[Tensor, Tensor]:
        if context is None or WEIGHTS not in context.shared:
            raise ValueError("these experts are routed by an earlier part of the layer, and none left its choice")
        return context.shared[WEIGHTS], context.shared[INDEX]
