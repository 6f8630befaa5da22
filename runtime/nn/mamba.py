"""Mamba (Gu and Dao 2023, arXiv:2312.00752), also with norms of its step, B and C, and with heads."""

from collections.abc import Callable
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .activation import Activation
from .causal_convolution import CausalConvolution
from .context import Context
from .gated_delta_net import reset_time_step
from .linear import reset_linear
from .linear_recurrence import selective_scan
from .norm import RMSNorm


class Mamba(nn.Module):
    """x: [T, H] -> [T, H]; a state space of each channel, whose step, input and output depend on the token.

    v = convolution of u x; s, B, C = norms of projections of v; d = softplus(dt_up s + dt_bias);
    h_t = exp(-exp(A_log) d_t) h_{t-1} + d_t B_t v_t; y = output((C_t h_t + D v_t) * silu(gate x)).

    heads: channels fall into so many heads with projections of their own. rank: width of s, state: of B and C.
    norm: RMS norms of s, B and C with eps norm_eps: none, without weights, or with weights.
    """

    uses_context = True
    context_parallel = True
    lora_targets = ("gate", "u", "output")

    def __init__(
        self,
        hidden: int,
        width: int,
        state: int,
        rank: int,
        conv_width: int,
        heads: int = 1,
        norm: Literal["none", "weightless", "weighted"] = "none",
        norm_eps: float = 0.0,
        bias: bool = False,
        output_bias: bool = False,
        conv_bias: bool = True,
        conv_act: Activation = "silu",
    ):
        super().__init__()
        if width % heads:
            raise ValueError(f"{width} channels do not fall into {heads} heads")
        self.heads, self.norm = heads, norm
        self.sums_over_ranks = heads == 1  # one head is cut by its channels: s, B and C are then sums over ranks
        self.sum_over_ranks: Callable[[Tensor], Tensor] | None = None
        each = width // heads
        self.gate = nn.Linear(hidden, width, bias=bias)
        self.u = nn.Linear(hidden, width, bias=bias)
        self.conv = CausalConvolution(width, conv_width, conv_act, conv_bias)
        self.dt_down = nn.Parameter(torch.empty(heads, rank, each))
        self.B = nn.Parameter(torch.empty(heads, state, each))
        self.C = nn.Parameter(torch.empty(heads, state, each))
        self.dt_up = nn.Parameter(torch.empty(heads, each, rank))
        self.dt_bias = nn.Parameter(torch.empty(width))
        self.A_log = nn.Parameter(torch.empty(width, state))
        self.D = nn.Parameter(torch.empty(width))
        if norm != "none":
            scaled = norm == "weighted"
            self.dt_norm = RMSNorm(rank, norm_eps, scaled=scaled)
            self.B_norm = RMSNorm(state, norm_eps, scaled=scaled)
            self.C_norm = RMSNorm(state, norm_eps, scaled=scaled)
        self.output = nn.Linear(width, hidden, bias=output_bias)

    @property
    def parallel_counts(self) -> tuple[str, ...]:
        return () if self.sums_over_ranks else ("heads",)

    @property
    def parallel_roles(self) -> dict[str, str | int]:
        inward, outward = (2, 1) if self.sums_over_ranks else (0, 0)
        return {
            "gate": "column",
            "u": "column",
            "conv": "column",
            "dt_down": inward,
            "B": inward,
            "C": inward,
            "dt_up": outward,
            "dt_bias": "column",
            "A_log": "column",
            "D": "column",
            "dt_norm": "replicate",
            "B_norm": "replicate",
            "C_norm": "replicate",
            "output": "row",
        }

    def reset_parameters(self, std: float) -> None:
        for linear in (self.gate, self.u, self.output):
            reset_linear(linear, std)
        for matrix in (self.dt_down, self.B, self.C):
            nn.init.normal_(matrix, std=std)
        nn.init.uniform_(self.dt_up, -(self.dt_up.shape[2] ** -0.5), self.dt_up.shape[2] ** -0.5)
        with torch.no_grad():
            self.A_log.copy_(torch.arange(1, self.A_log.shape[1] + 1).log().expand_as(self.A_log))
            self.D.fill_(1.0)
        reset_time_step(self.dt_bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        v = self.conv(self.u(x), context.lengths).unflatten(-1, (self.heads, -1))  # [T, N, P]
        low, B, C = (torch.einsum("tnp,nrp->tnr", v, matrix) for matrix in (self.dt_down, self.B, self.C))
        if self.sum_over_ranks is not None:
            low, B, C = (self.sum_over_ranks(part) for part in (low, B, C))
        if self.norm != "none":
            low, B, C = self.dt_norm(low), self.B_norm(B), self.C_norm(C)
        step = torch.einsum("tnr,npr->tnp", low, self.dt_up).to(wide)
        dt = F.softplus(step + self.dt_bias.to(wide).unflatten(0, (self.heads, -1)))
        rate = self.A_log.to(wide).exp().unflatten(0, (self.heads, -1))
        y = selective_scan(v.to(wide), dt, rate, B, C, context.lengths).flatten(1)
        y = y + self.D.to(wide) * v.flatten(1).to(wide)
        return self.output((y * F.silu(self.gate(x).to(wide))).to(x.dtype))
