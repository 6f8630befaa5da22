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


class PositionScale(nn.Module):
    """The factors that a model hands to the attention of all layers: position [T] -> [T]."""

    def __init__(self, kind: Literal["step_log", "log", "power"], factor: float, length: float):
        super().__init__()
        self.kind: QueryScale = kind
        self.factor, self.length = factor, length

    def forward(self, position: Tensor, dtype: torch.dtype) -> Tensor:
        return position_scale(self.kind, position, self.factor, self.length, dtype)
