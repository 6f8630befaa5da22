"""Root-mean-square norms (Zhang and Sennrich 2019, arXiv:1910.07467)."""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from dayzero.kernels.rms_norm import rms_norm

from .activation import Activation, activation
from .linear import reset_linear


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * (offset + weight).  x: [..., width] -> [..., width].

    offset is 0, or 1 where the checkpoint stores the weight's distance from 1. scaled: False for no weight at all.
    groups: the mean runs over each of this many equal parts of x by itself. weight_after_cast: whether what
    the weight multiplies is rounded to x's dtype before (`kernels.rms_norm`); groups are rounded once, at the end.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        offset: float = 0.0,
        scaled: bool = True,
        groups: int = 1,
        weight_after_cast: bool = True,
    ):
        super().__init__()
        if width % groups:
            raise ValueError(f"a norm of width {width} does not fall into {groups} groups")
        self.weight_after_cast = weight_after_cast
        self.width, self.eps, self.offset, self.groups = width, eps, offset, groups
        self.weight = nn.Parameter(torch.empty(width)) if scaled else None

    def reset_parameters(self, std: float) -> None:
        if self.weight is not None:
            nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        if self.groups == 1:
            return rms_norm(x, self.weight, self.eps, self.offset, weight_after_cast=self.weight_after_cast)
        wide = torch.promote_types(x.dtype, torch.float32)
        y = rms_norm(x.to(wide).unflatten(-1, (self.groups, -1)), None, self.eps).flatten(-2)
        return (y if self.weight is None else y * (self.offset + self.weight.to(wide))).to(x.dtype)


class ScaledFirstRMSNorm(nn.Module):
    """y = z / sqrt(mean(z^2) + eps) with z = x * (offset + weight): the weight enters the mean.

    x: [..., width] -> [..., width].
    """

    def __init__(self, width: int, eps: float, offset: float = 0.0):
        super().__init__()
        self.width, self.eps, self.offset = width, eps, offset
        self.weight = nn.Parameter(torch.empty(width))

    def reset_parameters(self, std: float) -> None:
        nn.init.constant_(self.weight, 1.0 - self.offset)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        scaled = x.to(wide) * (self.offset + self.weight.to(wide))
        return rms_norm(scaled.to(x.dtype), None, self.eps)


class SelfGatedRMSNorm(nn.Module):
    """y * sigmoid(up(act(down y))) with y = RMSNorm(x): a norm that weighs its channels by what it sees.

    down: [rank, width], up: [width, rank], both without bias. x: [..., width] -> [..., width].
    """

    lora_targets = ("down", "up")
    parallel_roles: ClassVar = {"down": "replicate", "up": "replicate"}

    def __init__(self, width: int, eps: float, rank: int, act: Activation, offset: float = 0.0):
        super().__init__()
        self.width = width
        self.norm = RMSNorm(width, eps, offset)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)
        self.act: Activation = act

    def reset_parameters(self, std: float) -> None:
        for linear in (self.down, self.up):
            reset_linear(linear, std)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        wide = torch.promote_types(y.dtype, torch.float32)
        gate = self.up(activation(self.act)(self.down(y))).to(wide)
        return (y * torch.sigmoid(gate)).to(y.dtype)


class GatedRMSNorm(nn.Module):
    """RMSNorm(x) * act(gate), or RMSNorm(x * act(gate)) where `gate_first`; as the outputs of linear attention and
    state-space layers are normed (Dao and Gu 2024, arXiv:2405.21060).

    x, gate: [..., width] -> [..., width]. groups, offset: as in RMSNorm.
    """

    def __init__(
        self,
        width: int,
        eps: float,
        act: Literal["silu", "sigmoid"] = "silu",
        gate_first: bool = False,
        offset: float = 0.0,
        groups: int = 1,
    ):
        super().__init__()
        self.width, self.act, self.gate_first = width, act, gate_first
        self.norm = RMSNorm(width, eps, offset, groups=groups)

    def forward(self, x: Tensor, gate: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        gate = torch.sigmoid(gate.to(wide)) if self.act == "sigmoid" else nn.functional.silu(gate.to(wide))
        if self.gate_first:
            return self.norm(x.to(wide) * gate).to(x.dtype)
        return (self.norm(x.to(wide)) * gate).to(x.dtype)
