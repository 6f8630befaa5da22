"""Parts of a layer without an activation: a matrix by itself, and several values as one."""

import torch
from torch import Tensor, nn

from .linear import reset_linear


class Projection(nn.Module):
    """y = W x + b.  x: [T, H] -> [T, out].  bias: whether there is b."""

    lora_targets = ("linear",)
    parallel_rows = True

    def __init__(self, hidden: int, out: int, bias: bool = False):
        super().__init__()
        self.linear = nn.Linear(hidden, out, bias=bias)

    def reset_parameters(self, std: float) -> None:
        reset_linear(self.linear, std)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class SideBySide(nn.Module):
    """[x_1 | x_2 | ...].  x_i: [T, H_i] -> [T, H_1 + H_2 + ...]."""

    parallel_rows = True

    def __init__(self):  # by itself, so that its arguments are known: none
        super().__init__()

    def forward(self, *values: Tensor) -> Tensor:
        return torch.cat(values, -1)
