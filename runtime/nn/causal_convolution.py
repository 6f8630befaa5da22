"""Causal depthwise convolution over the last few tokens of a document, as linear and recurrent mixers use it."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .activation import Activation, activation
from .cut import Cut, rows_before


def causal_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: tuple[int, ...]) -> Tensor:
    """y_t = sum_i weight[:, W-1-i] * x_{t-i} + bias, where x before a document's first token is zero.

    x: [T, C], weight: [C, W], bias: [C] -> [T, C]. Documents stand in one row with W-1 zeros before each, so that one
    convolution serves all of them and none sees another.
    """
    if isinstance(lengths, Cut):
        earlier = rows_before(x, lengths, weight.shape[1] - 1)
        pieces = (len(earlier) + lengths[0], *lengths[1:])
        return causal_convolution(torch.cat([earlier, x]), weight, bias, pieces)[len(earlier) :]
    tokens, gap = x.shape[0], weight.shape[1] - 1
    if not tokens:
        return x
    lengths_D = torch.tensor(lengths, device=x.device)
    before_D = gap * (1 + torch.arange(len(lengths), device=x.device))
    zeros_before = before_D.repeat_interleave(lengths_D, output_size=tokens)  # told, so that nobody waits to count
    place = torch.arange(tokens, device=x.device) + zeros_before
    row = x.new_zeros(tokens + gap * len(lengths), x.shape[1]).index_copy(0, place, x)
    y = F.conv1d(row.t()[None], weight[:, None], bias, groups=x.shape[1])[0].t()
    return y.index_select(0, place - gap)


class CausalConvolution(nn.Module):
    """act(causal depthwise convolution).  x: [T, C] -> [T, C]; computed in the weight's dtype, act None for none."""

    def __init__(self, channels: int, width: int, act: Activation | None = None, bias: bool = False):
        super().__init__()
        self.act: Activation | None = act
        self.weight = nn.Parameter(torch.empty(channels, width))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None

    def reset_parameters(self, std: float) -> None:
        nn.init.uniform_(self.weight, -(self.weight.shape[1] ** -0.5), self.weight.shape[1] ** -0.5)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, lengths: tuple[int, ...]) -> Tensor:
        y = causal_convolution(x.to(self.weight.dtype), self.weight, self.bias, lengths)
        return (y if self.act is None else activation(self.act)(y)).to(x.dtype)
