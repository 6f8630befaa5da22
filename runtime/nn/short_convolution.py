"""A gated short convolution as token mixer (Liquid AI 2025, LFM2 technical report, arXiv:2511.23404)."""

from typing import ClassVar

from torch import Tensor, nn

from .causal_convolution import CausalConvolution
from .context import Context
from .linear import reset_linear


class GatedShortConvolution(nn.Module):
    """output(C x * convolution(B x * u x)).  x: [T, H] -> [T, H]; the convolution sees its own document only."""

    uses_context = True
    context_parallel = True
    lora_targets = ("B", "C", "u", "output")
    parallel_roles: ClassVar = {"B": "column", "C": "column", "u": "column", "conv": "column", "output": "row"}

    def __init__(
        self, hidden: int, width: int, conv_width: int, bias: bool = False, conv_bias: bool = False,
        output_bias: bool = False,
    ):  # fmt: skip
        super().__init__()
        self.B = nn.Linear(hidden, width, bias=bias)
        self.C = nn.Linear(hidden, width, bias=bias)
        self.u = nn.Linear(hidden, width, bias=bias)
        self.conv = CausalConvolution(width, conv_width, None, conv_bias)
        self.output = nn.Linear(width, hidden, bias=output_bias)

    def reset_parameters(self, std: float) -> None:
        for linear in (self.B, self.C, self.u, self.output):
            reset_linear(linear, std)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.output(self.C(x) * self.conv(self.B(x) * self.u(x), context.lengths))
