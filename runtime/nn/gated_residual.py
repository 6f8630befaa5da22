"""Gated residual streams: each channel of each stream is let in by a gate of its own."""

from typing import ClassVar

import torch.nn.functional as F
from torch import Tensor, nn

from .linear import reset_linear
from .norm import RMSNorm


class GatedConnection(nn.Module):
    """streams: [T, n, H] -> what a block reads [T, H], and how much of its output each stream takes, post [T, n].

        z = rms of each stream by itself, side by side
        gate = sigmoid(up(silu(down(z) / n)))        reads mean over streams of gate * z
        post = post_scale * sigmoid(inject(z) / n)

    injects False: what is read alone, as behind the last layer. rank: of the gate. eps, offset: of the norm.
    """

    lora_targets = ("down", "up", "inject")
    parallel_roles: ClassVar[dict[str, str]] = dict.fromkeys(("norm", "down", "up", "inject"), "replicate")

    def __init__(
        self,
        hidden: int,
        streams: int,
        rank: int,
        eps: float,
        offset: float = 0.0,
        post_scale: float = 2.0,
        injects: bool = True,
    ):
        super().__init__()
        wide = streams * hidden
        self.streams, self.post_scale = streams, post_scale
        self.norm = RMSNorm(wide, eps, offset, groups=streams)
        self.down, self.up = nn.Linear(wide, rank, bias=False), nn.Linear(rank, wide, bias=False)
        self.inject = nn.Linear(wide, streams, bias=False) if injects else None

    def reset_parameters(self, std: float) -> None:
        for linear in (self.down, self.up, self.inject):
            if linear is not None:
                reset_linear(linear, std)

    def forward(self, streams: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        z = self.norm(streams.flatten(1))
        gate = self.up(F.silu(self.down(z) / self.streams)).sigmoid()
        read = (gate * z).unflatten(-1, (self.streams, -1)).mean(1)
        if self.inject is None:
            return read
        return read, self.post_scale * (self.inject(z) / self.streams).sigmoid()
