"""Gated feed-forward layer (Shazeer 2020, arXiv:2002.05202)."""

from torch import Tensor, nn

from .activation import Activation, gated
from .linear import reset_linear


class GatedFeedForward(nn.Module):
    """down(act(gate x) * (up x)).  x: [T, H] -> [T, H]."""

    lora_targets = ("gate", "up", "down")

    def __init__(self, hidden: int, width: int, act: Activation, bias: bool = False):
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=bias)
        self.up = nn.Linear(hidden, width, bias=bias)
        self.down = nn.Linear(width, hidden, bias=bias)
        self.act: Activation = act

    def reset_parameters(self, std: float) -> None:
        for linear in (self.gate, self.up, self.down):
            reset_linear(linear, std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(gated(self.act, self.gate(x), self.up(x)))
