"""Queries that grow with their position, so that attention over a long context does not flatten.

step_log: 1 + factor * log(1 + floor((position + 1) / length)) (Llama 4, after Nakanishi 2025, arXiv:2501.19399).
log: 1 + factor * log(max(1, (position + 1) / length)).
power: (1 + (position + 1) / length) ** factor (scalable softmax, Nakanishi 2025 as above).
handed: what the model has put into context.shared["query_scale"], [T], for all layers at once.
"""

from typing import Literal

import torch
from torch import Tensor, nn

from .context import Context

QueryScale = Literal["step_log", "log", "power", "handed"]


def query_scale(kind: QueryScale, context: Context, factor: float, length: float, dtype: torch.dtype) -> Tensor:
    """[T], in float32 at least. Raises ValueError where it should be handed and is not."""
    if kind == "handed":
        if "query_scale" not in context.shared:
            raise ValueError("this attention scales queries by what the model hands it, but it hands nothing")
        return context.shared["query_scale"]
    return position_scale(kind, context.position, factor, length, dtype)


def position_scale(kind: QueryScale, position: Tensor, factor: float, length: float, dtype: torch.dtype) -> Tensor:
    """The factor of each position [T], in float32 at least."""
    seen = position.to(torch.promote_types(dtype, torch.float32)) + 1.0
    if kind == "step_log":
        return torch.log1p(torch.floor(seen / length)) * factor + 1.0
    if kind == "power":
        return torch.exp(factor * torch.log1p(seen / length))
    return torch.log((seen / length).clamp(min=1.0)) * factor + 1.0


def stepwise_scale(position: Tensor, beta: float, step: int) -> Tensor:
    """1 + beta * log(1 + floor(position / step)): [T], float32 at least; the first token counts as position 0."""
    return 1 + beta * torch.log(1 + torch.floor(position / step))


class PositionScale(nn.Module):
    """The factors that a model hands to the attention of all layers: position [T] -> [T]."""

    def __init__(self, kind: Literal["step_log", "log", "power"], factor: float, length: float):
        super().__init__()
        self.kind: QueryScale = kind
        self.factor, self.length = factor, length

    def forward(self, position: Tensor, dtype: torch.dtype) -> Tensor:
        return position_scale(self.kind, position, self.factor, self.length, dtype)


class LearnedPositionScale(nn.Module):
    """scale_n * log(position + 1) + bias_n for each head n.  query: [T, N, D] -> [T, N, D]."""

    def __init__(self, heads: int):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(heads))
        self.bias = nn.Parameter(torch.empty(heads))

    def reset_parameters(self, std: float) -> None:
        nn.init.zeros_(self.scale)
        nn.init.ones_(self.bias)

    def forward(self, query: Tensor, position: Tensor) -> Tensor:
        compute = torch.promote_types(query.dtype, torch.float32)
        growth = (position + 1).to(compute).log()
        factor = self.scale.to(compute) * growth[:, None] + self.bias.to(compute)
        return query * factor[..., None].to(query.dtype)
