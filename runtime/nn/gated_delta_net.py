"""Linear attention by the gated delta rule: Gated DeltaNet (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464), and
with a decay for every channel Kimi Delta Attention (arXiv:2510.26692)."""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .activation import Activation, activation
from .causal_convolution import CausalConvolution
from .context import Context
from .delta_rule import gated_delta_rule
from .linear import reset_linear
from .low_rank import LowRank
from .norm import RMSNorm

GateActivation = Activation | Literal["sigmoid"]


class GatedDeltaNet(nn.Module):
    """x: [T, H] -> [T, H]; a state of each document is decayed, corrected and read, token by token.

    q, k, v = convolutions of projections; q and k get length 1 (l2_eps under the root), q is scaled by key_dim ** -0.5;
    beta = beta_scale * sigmoid(B x); o = delta rule(q, k, v, decay, beta); y = output(norm(o) * gate_act(gate x)).

    heads: of values and states; key_heads: of queries and keys, each for heads / key_heads consecutive heads.
    channel_decay: one decay for each of a head's key channels instead of one a head. With u = D x + dt_bias it is
    -exp(A_log) softplus(u), or with a bound (negative) bound * sigmoid(exp(A_log) u), which never passes the bound.
    decay_rank, gate_rank: the projection goes through so many values; None for one matrix.
    """

    uses_context = True
    context_parallel = True
    lora_targets = ("query", "key", "value", "gate", "output")
    parallel_counts: ClassVar = ("heads", "key_heads")
    parallel_roles: ClassVar = {
        "query": "column:key_heads",
        "key": "column:key_heads",
        "value": "column",
        "gate": "column",
        "beta": "column",
        "decay": "column",
        "query_conv": "column:key_heads",
        "key_conv": "column:key_heads",
        "value_conv": "column",
        "A_log": "column",
        "dt_bias": "column",
        "norm": "replicate",
        "output": "row",
    }

    def __init__(
        self,
        hidden: int,
        heads: int,
        key_heads: int,
        key_dim: int,
        value_dim: int,
        conv_width: int,
        norm_eps: float,
        l2_eps: float,
        channel_decay: bool = False,
        bound: float | None = None,
        decay_rank: int | None = None,
        gate_rank: int | None = None,
        beta_scale: float = 1.0,
        conv_act: Activation = "silu",
        gate_act: GateActivation = "silu",
        conv_bias: bool = False,
    ):
        super().__init__()
        if heads % key_heads:
            raise ValueError(f"{heads} heads cannot share {key_heads} key heads evenly")
        self.heads, self.key_heads, self.key_dim, self.value_dim = heads, key_heads, key_dim, value_dim
        self.l2_eps, self.bound, self.beta_scale = l2_eps, bound, beta_scale
        self.gate_act: GateActivation = gate_act
        decays = heads * key_dim if channel_decay else heads
        self.query = nn.Linear(hidden, key_heads * key_dim, bias=False)
        self.key = nn.Linear(hidden, key_heads * key_dim, bias=False)
        self.value = nn.Linear(hidden, heads * value_dim, bias=False)
        self.query_conv = CausalConvolution(key_heads * key_dim, conv_width, conv_act, conv_bias)
        self.key_conv = CausalConvolution(key_heads * key_dim, conv_width, conv_act, conv_bias)
        self.value_conv = CausalConvolution(heads * value_dim, conv_width, conv_act, conv_bias)
        self.beta = nn.Linear(hidden, heads, bias=False)
        self.decay = _projection(hidden, decay_rank, decays)
        self.A_log = nn.Parameter(torch.empty(heads))
        self.dt_bias = nn.Parameter(torch.empty(decays))
        self.gate = _projection(hidden, gate_rank, heads * value_dim)
        self.norm = RMSNorm(value_dim, norm_eps, weight_after_cast=False)  # what it reads may be in float32
        self.output = nn.Linear(heads * value_dim, hidden, bias=False)

    def reset_parameters(self, std: float) -> None:
        for linear in (self.query, self.key, self.value, self.beta, self.decay, self.gate, self.output):
            if isinstance(linear, nn.Linear):
                reset_linear(linear, std)
        with torch.no_grad():
            self.A_log.uniform_(1.0, 16.0).log_()
        reset_time_step(self.dt_bias)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        lengths = context.lengths
        wide = torch.promote_types(x.dtype, torch.float32)
        query = self.query_conv(self.query(x), lengths).unflatten(-1, (self.key_heads, -1)).to(wide)
        key = self.key_conv(self.key(x), lengths).unflatten(-1, (self.key_heads, -1)).to(wide)
        value = self.value_conv(self.value(x), lengths).unflatten(-1, (self.heads, -1))
        query = unit_length(query, self.l2_eps) * self.key_dim**-0.5
        key = unit_length(key, self.l2_eps)
        if self.heads != self.key_heads:
            query, key = (part.repeat_interleave(self.heads // self.key_heads, 1) for part in (query, key))
        beta = torch.sigmoid(self.beta(x).to(wide))
        if self.beta_scale != 1.0:
            beta = beta * self.beta_scale
        mixed = gated_delta_rule(query, key, value, self._decay(x, wide), beta, lengths)
        gate = self.gate(x).unflatten(-1, (self.heads, -1)).to(wide)
        gate = torch.sigmoid(gate) if self.gate_act == "sigmoid" else activation(self.gate_act)(gate)
        gated = (self.norm(mixed) * gate).to(x.dtype)
        return self.output(gated.flatten(-2))

    def _decay(self, x: Tensor, wide: torch.dtype) -> Tensor:
        """[T, N, K or 1], the logarithm of what is kept, in float32 at least."""
        u = (self.decay(x).to(wide) + self.dt_bias.to(wide)).unflatten(-1, (self.heads, -1))
        rate = self.A_log.to(wide).exp()[:, None]
        if self.bound is not None:
            return self.bound * torch.sigmoid(rate * u)
        return -rate * F.softplus(u)


def _projection(hidden: int, rank: int | None, width: int) -> nn.Module:
    return nn.Linear(hidden, width, bias=False) if rank is None else LowRank(hidden, rank, width)


def unit_length(x: Tensor, eps: float) -> Tensor:
    """x / sqrt(sum(x^2) + eps) over the last dimension."""
    return x * torch.rsqrt(x.pow(2).sum(-1, keepdim=True) + eps)


def reset_time_step(bias: Tensor, low: float = 1e-3, high: float = 0.1) -> None:
    """softplus(bias) spread evenly between the orders of magnitude of low and high (Gu and Dao 2023)."""
    with torch.no_grad():
        bias.uniform_(0.0, 1.0).mul_(torch.tensor(high / low).log()).add_(torch.tensor(low).log()).exp_()
        bias.add_(torch.log(-torch.expm1(-bias)))
