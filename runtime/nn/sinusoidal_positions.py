"""Sinusoidal positions that are added to embeddings (Vaswani et al. 2017, arXiv:1706.03762)."""

import math

import torch
from torch import Tensor, nn


class SinusoidalPositions(nn.Module):
    """ids: [T] -> [T, width], nothing learned: sin(p f_i) in the first half of the channels, cos(p f_i) in the second,
    f_i = base ** -(i / (width // 2 - 1)).

    p counts the tokens of a document from `first` on. padding: the token id that is not counted and has no position,
    zeros; None where every token counts.
    """

    def __init__(self, width: int, base: float = 10000.0, first: int = 0, padding: int | None = None):
        super().__init__()
        if width % 2 or width < 4:
            raise ValueError(f"width {width} is not even, or has fewer than two frequencies")
        self.width, self.base, self.first, self.padding = width, base, first, padding

    def forward(self, ids: Tensor, lengths: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """lengths: of the documents. Computed in float32 at least."""
        wide = torch.promote_types(dtype, torch.float32)
        pairs = self.width // 2
        step = math.log(self.base) / (pairs - 1)
        frequency = torch.exp(torch.arange(pairs, device=ids.device).to(wide) * -step)
        counted = torch.ones_like(ids) if self.padding is None else (ids != self.padding).to(ids.dtype)
        place = torch.cat([part.cumsum(0) for part in counted.split(lengths)]) if lengths else counted
        angle = (place - 1 + self.first).to(wide)[:, None] * frequency
        made = torch.cat((angle.sin(), angle.cos()), -1)
        return (made if self.padding is None else made * counted[:, None].to(wide)).to(dtype)
