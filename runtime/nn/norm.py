"""Root-mean-square norm (Zhang and Sennrich 2019, arXiv:1910.07467)."""

import torch
from torch import Tensor, nn

from dayzero.kernels.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight).  x: [..., width] -> [..., width].

    offset is 0, or 1 where the checkpoint stores the weight's distance from 1.
    """

    def __init__(self, width: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.width, self.eps, self.offset = width, eps, offset
        self.weight = nn.Parameter(torch.empty(width))

    def reset_parameters(self, std: float) -> None:
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps, self.offset)
