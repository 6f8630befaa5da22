"""A projection through a few values."""

from typing import ClassVar

from torch import Tensor, nn

from .linear import reset_linear


class LowRank(nn.Module):
    """up(down(x)).  x: [T, H] -> [T, width]."""

    lora_targets = ("down", "up")
    parallel_roles: ClassVar = {"down": "replicate", "up": "column"}

    def __init__(self, hidden: int, rank: int, width: int, bias: bool = False):
        super().__init__()
        self.down = nn.Linear(hidden, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=bias)

    def reset_parameters(self, std: float) -> None:
        reset_linear(self.down, std)
        reset_linear(self.up, std)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(self.down(x))
