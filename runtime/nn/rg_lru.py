"""The recurrent block of Griffin with its real-gated linear recurrent unit (De et al. 2024, arXiv:2402.19427)."""

from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .activation import Activation, activation
from .causal_convolution import CausalConvolution
from .context import Context
from .linear import reset_linear
from .linear_recurrence import linear_recurrence

MAX_SLOPE = 1000.0  # of the square root, whose derivative at 0 has no bound


class RecurrentBlock(nn.Module):
    """output(recurrence(convolution(u x)) * act(gate x)).  x: [T, H] -> [T, H].

    With v from the convolution, block-diagonal gates i = sigmoid(W_i v + b_i) and r = sigmoid(W_r v + b_r), and
    log a_t = rate * r_t * softplus(A): h_t = a_t h_{t-1} + sqrt(1 - a_t^2) i_t v_t, and h_t = i_t v_t at the first
    token of a document. rate is negative; `heads` is the number of blocks of W_i and W_r.
    """

    uses_context = True
    context_parallel = True
    lora_targets = ("gate", "u", "output")
    parallel_counts: ClassVar = ("heads",)
    parallel_roles: ClassVar = {
        "gate": "column",
        "u": "column",
        "conv": "column",
        "input_gate": "column",
        "input_bias": "column",
        "recurrence_gate": "column",
        "recurrence_bias": "column",
        "A": "column",
        "output": "row",
    }

    def __init__(
        self,
        hidden: int,
        width: int,
        heads: int,
        conv_width: int,
        act: Activation,
        rate: float = -8.0,
        bias: bool = True,
        output_bias: bool = True,
        conv_bias: bool = True,
    ):
        super().__init__()
        if width % heads:
            raise ValueError(f"{width} channels do not fall into {heads} blocks")
        self.heads, self.rate = heads, rate
        self.act: Activation = act
        each = width // heads
        self.gate = nn.Linear(hidden, width, bias=bias)
        self.u = nn.Linear(hidden, width, bias=bias)
        self.conv = CausalConvolution(width, conv_width, None, conv_bias)
        self.input_gate = nn.Parameter(torch.empty(heads, each, each))
        self.input_bias = nn.Parameter(torch.empty(heads, each))
        self.recurrence_gate = nn.Parameter(torch.empty(heads, each, each))
        self.recurrence_bias = nn.Parameter(torch.empty(heads, each))
        self.A = nn.Parameter(torch.empty(width))
        self.output = nn.Linear(width, hidden, bias=output_bias)

    def reset_parameters(self, std: float) -> None:
        for linear in (self.gate, self.u, self.output):
            reset_linear(linear, std)
        for matrix, bias in ((self.input_gate, self.input_bias), (self.recurrence_gate, self.recurrence_bias)):
            nn.init.normal_(matrix, std=matrix.shape[1] ** -0.5)
            nn.init.zeros_(bias)
        with torch.no_grad():  # a ** -rate between 0.9 and 0.999
            kept = torch.empty_like(self.A).uniform_(0.9, 0.999)
            self.A.copy_(torch.log(torch.expm1(-0.5 * kept.square().log())))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        v = self.conv(self.u(x), context.lengths)
        parts = v.unflatten(-1, (self.heads, -1))
        kept_gate = torch.sigmoid(self._blocks(parts, self.recurrence_gate, self.recurrence_bias).to(wide))
        input_gate = torch.sigmoid(self._blocks(parts, self.input_gate, self.input_bias).to(wide))
        log_decay = self.rate * kept_gate * F.softplus(self.A.to(wide))
        first = (context.position == 0)[:, None]
        share = _BoundedRoot.apply(1.0 - torch.exp(2.0 * log_decay))
        update = v.to(wide) * input_gate * torch.where(first, 1.0, share)
        # What precedes a document's first token is no state, so its decay has no part in anything.
        decay = torch.where(first, 0.0, log_decay.exp())
        mixed = linear_recurrence(decay, update, context.lengths)
        return self.output((mixed * activation(self.act)(self.gate(x))).to(x.dtype))

    def _blocks(self, parts: Tensor, matrix: Tensor, bias: Tensor) -> Tensor:
        """[T, N, P] through one matrix [P, P] a head -> [T, N * P]."""
        return (torch.einsum("tnp,npq->tnq", parts, matrix) + bias).flatten(-2)


class _BoundedRoot(torch.autograd.Function):
    """sqrt(x), whose derivative is at most MAX_SLOPE."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return torch.sqrt(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad / torch.sqrt(torch.clamp(4.0 * x, min=MAX_SLOPE**-2))
