"""Details of routing: which groups of experts may be selected, and how the weights of the selected are normalised."""

from typing import Literal

import torch
from torch import Tensor, nn


class GroupLimit(nn.Module):
    """Leaves only the experts of the `kept` best groups (DeepSeek-AI 2024, arXiv:2405.04434, section 2.2.2).

    by: a group is as good as the sum of its two best scores ("top2"), or its best ("max"). The scores of the other
    groups become minus infinity, or 0 where zero_fill: then an expert of another group may win over a negative score.
    scores: [T, E], experts of a group side by side -> [T, E].
    """

    def __init__(self, groups: int, kept: int, by: Literal["top2", "max"] = "top2", zero_fill: bool = False):
        super().__init__()
        self.groups, self.kept, self.by, self.zero_fill = groups, kept, by, zero_fill

    def forward(self, scores: Tensor) -> Tensor:
        grouped = scores.unflatten(-1, (self.groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(-1) if self.by == "top2" else grouped.max(-1).values
        chosen = torch.topk(best, self.kept, dim=-1).indices
        outside = torch.ones_like(best, dtype=torch.bool).scatter(-1, chosen, False)
        fill = 0.0 if self.zero_fill else float("-inf")
        return grouped.masked_fill(outside.unsqueeze(-1), fill).flatten(-2)


class Normalise(nn.Module):
    """weights / total, where total is their sum, or their p-norm for another order than 1.

    eps is added to the total; where `minimum` is not None the total is at least that. weights: [T, K] -> [T, K].
    """

    def __init__(self, eps: float = 0.0, minimum: float | None = None, order: float = 1.0):
        super().__init__()
        self.eps, self.minimum, self.order = eps, minimum, order

    def forward(self, weights: Tensor) -> Tensor:
        if self.order == 1.0:
            total = weights.sum(-1, keepdim=True)
        else:
            total = torch.linalg.vector_norm(weights, ord=self.order, dim=-1, keepdim=True)
        if self.eps:
            total = total + self.eps
        if self.minimum is not None:
            total = total.clamp(min=self.minimum)
        return weights / total
