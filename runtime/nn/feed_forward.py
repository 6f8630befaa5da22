"""Feed-forward layers: gated (Shazeer 2020, arXiv:2002.05202) and with one projection up."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from .activation import Activation, activation
from .gated_activation import Gate, gated
from .linear import reset_linear


class GatedFeedForward(nn.Module):
    """output_scale * down(act(gate_scale * gate x) * (up x)).  x: [T, H] -> [T, H].

    bias: of all three projections. learned_scale: the output is multiplied by a parameter of one element too.
    parts: the width is that of `parts` feed-forward layers side by side; `share` [T, parts] then weighs each of them.
    """

    lora_targets = ("gate", "up", "down")

    def __init__(
        self,
        hidden: int,
        width: int,
        act: Gate,
        bias: bool = False,
        gate_scale: float = 1.0,
        output_scale: float = 1.0,
        learned_scale: bool = False,
        parts: int = 1,
    ):
        super().__init__()
        self.gate = nn.Linear(hidden, width, bias=bias)
        self.up = nn.Linear(hidden, width, bias=bias)
        self.down = nn.Linear(width, hidden, bias=bias)
        self.act: Gate = act
        self.gate_scale, self.output_scale, self.parts = gate_scale, output_scale, parts
        self.scale = nn.Parameter(torch.empty(1)) if learned_scale else None

    @property
    def parallel_roles(self) -> dict[str, str] | None:
        """Layers side by side are not cut: each of them would have to be."""
        return {"gate": "column", "up": "column", "down": "row"} if self.parts == 1 else None

    def reset_parameters(self, std: float) -> None:
        for linear in (self.gate, self.up, self.down):
            reset_linear(linear, std)
        if self.scale is not None:
            nn.init.ones_(self.scale)

    def forward(self, x: Tensor, share: Tensor | None = None) -> Tensor:
        gate = self.gate(x)
        if self.gate_scale != 1.0:
            gate = gate * self.gate_scale
        inner = gated(self.act, gate, self.up(x))
        if share is not None:
            inner = (inner.unflatten(-1, (self.parts, -1)) * share.unsqueeze(-1).to(inner.dtype)).flatten(-2)
        y = self.down(inner)
        if self.output_scale != 1.0:
            y = y * self.output_scale
        return y if self.scale is None else y * self.scale


class FeedForward(nn.Module):
    """down(act(up x)).  x: [T, H] -> [T, H].  bias: of both projections."""

    lora_targets = ("up", "down")
    parallel_roles: ClassVar = {"up": "column", "down": "row"}

    def __init__(self, hidden: int, width: int, act: Activation, bias: bool = False):
        super().__init__()
        self.up = nn.Linear(hidden, width, bias=bias)
        self.down = nn.Linear(width, hidden, bias=bias)
        self.act: Activation = act

    def reset_parameters(self, std: float) -> None:
        for linear in (self.up, self.down):
            reset_linear(linear, std)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(activation(self.act)(self.up(x)))
