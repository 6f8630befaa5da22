"""A learned factor for every channel of the stream, as on residual branches (Touvron et al. 2021, arXiv:2103.17239)."""

import torch
from torch import Tensor, nn


class ChannelScale(nn.Module):
    """y = x * weight.  x: [T, H] -> [T, H]; width is H, or 1 for one factor for all channels.

    trained: False for factors that the checkpoint holds and no optimizer sees.
    """

    def __init__(self, width: int, trained: bool = True):
        super().__init__()
        weight = torch.empty(width)
        if trained:
            self.weight = nn.Parameter(weight)
        else:
            self.register_buffer("weight", weight)

    def reset_parameters(self, std: float) -> None:
        nn.init.ones_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)
