"""Learned shifts and factors for every channel, of one value or of the two that a residual sum adds."""

import torch
from torch import Tensor, nn


class Affine(nn.Module):
    """y = (x + bias) * weight.  x: [T, H] -> [T, H]."""

    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))
        self.bias = nn.Parameter(torch.empty(width))

    def reset_parameters(self, std: float) -> None:
        nn.init.ones_(self.weight)
        nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        return (x + self.bias) * self.weight


class AffineSum(nn.Module):
    """y = (first + bias_1) * weight_1 + (second + bias_2) * weight_2.  first, second: [T, H] -> [T, H]."""

    def __init__(self, width: int):
        super().__init__()
        self.first, self.second = Affine(width), Affine(width)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        return self.first(first) + self.second(second)
