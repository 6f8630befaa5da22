"""Rotary position embedding (Su et al. 2021, arXiv:2104.09864)."""

from typing import Literal

import torch
from torch import Tensor, nn

RotaryStyle = Literal["half", "interleaved"]


class Rotary(nn.Module):
    """The tables cos, sin: [T, dim] for positions [T]; frequency i is theta^(-2i/dim).

    Each frequency stands twice, at i and i + dim/2 ("half") or at 2i and 2i + 1 ("interleaved").
    Computed in float32, or float64 for float64 models.
    """

    def __init__(self, dim: int, theta: float, style: RotaryStyle = "half"):
        super().__init__()
        self.dim, self.theta, self.style = dim, theta, style

    def forward(self, position: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        compute = torch.float64 if dtype == torch.float64 else torch.float32
        exponent = torch.arange(0, self.dim, 2, device=position.device, dtype=compute) / self.dim
        angle = position.to(compute)[:, None] * (1.0 / self.theta**exponent)
        angle = torch.cat((angle, angle), -1) if self.style == "half" else angle.repeat_interleave(2, -1)
        return angle.cos().to(dtype), angle.sin().to(dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, style: RotaryStyle) -> Tensor:
    """Turns the first `dim` channels of every head by its position's angle and leaves the rest.

    x: [T, heads, D]; cos, sin: [T, dim] with dim <= D.
    """
    dim = cos.shape[-1]
    turned, rest = x[..., :dim], x[..., dim:]
    if style == "half":
        low, high = turned.chunk(2, -1)
        crossed = torch.cat((-high, low), -1)
    else:
        crossed = torch.stack((-turned[..., 1::2], turned[..., 0::2]), -1).flatten(-2)
    turned = turned * cos[:, None] + crossed * sin[:, None]
    return torch.cat((turned, rest), -1) if rest.shape[-1] else turned
