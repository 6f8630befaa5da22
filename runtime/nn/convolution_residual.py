"""A short causal convolution added to what it reads, as on the branches of a layer."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from .causal_convolution import causal_convolution
from .context import Context


class ConvolutionResidual(nn.Module):
    """y = (x + convolution(x)) / divisor.  x: [T, H] -> [T, H]; depthwise over the last `conv_width` tokens.

    A token sees its own document only. weight: [H, conv_width], the last column for the token itself. Computed in
    float32 at least.
    """

    uses_context = True
    context_parallel = True
    parallel_roles: ClassVar[dict[str, str]] = {"weight": "replicate", "bias": "replicate"}

    def __init__(self, hidden: int, conv_width: int, divisor: float = 1.0, bias: bool = False):
        super().__init__()
        self.divisor = divisor
        self.weight = nn.Parameter(torch.empty(hidden, conv_width))
        self.bias = nn.Parameter(torch.empty(hidden)) if bias else None

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        held, bias = x.to(wide), None if self.bias is None else self.bias.to(wide)
        y = held + causal_convolution(held, self.weight.to(wide), bias, context.lengths)
        return (y if self.divisor == 1.0 else y / self.divisor).to(x.dtype)
