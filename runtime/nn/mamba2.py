"""Mamba-2 (Dao and Gu 2024, arXiv:2405.21060)."""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .activation import Activation
from .causal_convolution import CausalConvolution
from .context import Context
from .gated_delta_net import reset_time_step
from .linear import reset_linear
from .linear_attention import decayed_linear_attention
from .norm import RMSNorm

GatedNorm = Literal["none", "gate_first", "norm_first"]


class Mamba2(nn.Module):
    """x: [T, H] -> [T, H]; a state space of each head, whose decay and input size depend on the token.

    u, B, C = convolutions of projections of x; d = softplus(dt x + dt_bias), clamped to time_step_min .. time_step_max
    where these are given; h_t = exp(-exp(A_log) d_t) h_{t-1} + d_t B_t u_t; y_t = C_t h_t + D u_t.
    Then silu(gate) y, or with a norm of norm_groups groups norm(silu(gate) y) or silu(gate) norm(y), and the output.

    groups: heads / groups heads share B and C. multipliers: on what the five projections give, in the order gate, u,
    B, C, dt; input_multiplier: on x.
    """

    uses_context = True
    context_parallel = True
    lora_targets = ("gate", "u", "output")
    parallel_counts: ClassVar = ("heads", "groups")
    parallel_roles: ClassVar = {
        "gate": "column",
        "u": "column",
        "B": "column:groups",
        "C": "column:groups",
        "dt": "column",
        "u_conv": "column",
        "B_conv": "column:groups",
        "C_conv": "column:groups",
        "A_log": "column",
        "dt_bias": "column",
        "D": "column",
        "norm": "column",
        "output": "row",
    }

    def __init__(
        self,
        hidden: int,
        heads: int,
        head_dim: int,
        state: int,
        conv_width: int,
        groups: int = 1,
        norm: GatedNorm = "gate_first",
        norm_groups: int = 1,
        norm_eps: float = 0.0,
        time_step_min: float | None = None,
        time_step_max: float | None = None,
        bias: bool = False,
        output_bias: bool = False,
        conv_bias: bool = True,
        conv_act: Activation = "silu",
        input_multiplier: float = 1.0,
        multipliers: list[float] | None = None,
    ):
        super().__init__()
        width = heads * head_dim
        if heads % groups or width % norm_groups:
            raise ValueError(f"{heads} heads of {head_dim} do not fall into {groups} groups, {norm_groups} in the norm")
        self.heads, self.groups, self.norm_groups, self.norm_kind = heads, groups, norm_groups, norm
        self.norm_eps, self.time_step_min, self.time_step_max = norm_eps, time_step_min, time_step_max
        self.input_multiplier, self.multipliers = input_multiplier, multipliers
        self.gate = nn.Linear(hidden, width, bias=bias)
        self.u = nn.Linear(hidden, width, bias=bias)
        self.B = nn.Linear(hidden, groups * state, bias=bias)
        self.C = nn.Linear(hidden, groups * state, bias=bias)
        self.dt = nn.Linear(hidden, heads, bias=bias)
        self.u_conv = CausalConvolution(width, conv_width, conv_act, conv_bias)
        self.B_conv = CausalConvolution(groups * state, conv_width, conv_act, conv_bias)
        self.C_conv = CausalConvolution(groups * state, conv_width, conv_act, conv_bias)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(heads))
        self.D = nn.Parameter(torch.empty(heads))
        if norm != "none":
            self.norm = RMSNorm(width, norm_eps, groups=norm_groups)
        self.output = nn.Linear(width, hidden, bias=output_bias)

    def reset_parameters(self, std: float) -> None:
        for linear in (self.gate, self.u, self.B, self.C, self.dt, self.output):
            reset_linear(linear, std)
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1, self.heads + 1).log())
            self.D.fill_(1.0)
        reset_time_step(self.dt_bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        lengths = context.lengths
        wide = torch.promote_types(x.dtype, torch.float32)
        if self.input_multiplier != 1.0:
            x = x * self.input_multiplier
        gate, u, B, C, dt = (projection(x) for projection in (self.gate, self.u, self.B, self.C, self.dt))
        if self.multipliers is not None:
            factors = x.new_tensor(self.multipliers)
            gate, u, B, C, dt = (part * factor for part, factor in zip((gate, u, B, C, dt), factors, strict=True))
        u = self.u_conv(u, lengths).unflatten(-1, (self.heads, -1)).to(wide)
        B = self.B_conv(B, lengths).unflatten(-1, (self.groups, -1)).to(wide)
        C = self.C_conv(C, lengths).unflatten(-1, (self.groups, -1)).to(wide)
        if self.groups != self.heads:
            B, C = (part.repeat_interleave(self.heads // self.groups, 1) for part in (B, C))
        dt = F.softplus(dt.to(wide) + self.dt_bias.to(wide))
        if self.time_step_min is not None or self.time_step_max is not None:
            dt = dt.clamp(self.time_step_min, self.time_step_max)
        decay = -self.A_log.to(wide).exp() * dt
        mixed = decayed_linear_attention(C, B, u * dt[..., None], decay[..., None], lengths)
        y = (mixed + self.D.to(wide)[:, None] * u).flatten(-2)
        gate = F.silu(gate.to(wide))
        if self.norm_kind == "none":
            y = y * gate
        elif self.norm_kind == "gate_first":
            y = self.norm(y * gate)
        else:
            y = self.norm(y) * gate
        return self.output(y.to(x.dtype))
