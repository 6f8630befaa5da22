"""Lightning attention: linear attention with a fixed rate of decay a head (Qin et al. 2024, arXiv:2401.04658)."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from .activation import Activation, activation
from .context import Context
from .linear import reset_linear
from .linear_attention import decayed_linear_attention
from .norm import RMSNorm


class LightningAttention(nn.Module):
    """x: [T, H] -> [T, H].

    S_t = exp(-slope) S_{t-1} + k_t v_t^T;  o_t = S_t^T q_t;  y = output(norm(o) * sigmoid(gate x)).
    q, k and v are the activation of their projections; the norm runs over all heads at once.
    slope: [N], positive, fixed: it is read from the checkpoint and never trained.
    """

    uses_context = True
    context_parallel = True
    lora_targets = ("query", "key", "value", "gate", "output")
    parallel_counts: ClassVar = ("heads",)
    parallel_roles: ClassVar = {
        "query": "column",
        "key": "column",
        "value": "column",
        "gate": "column",
        "slope": "column",
        "norm": "column",
        "output": "row",
    }
    slope: Tensor

    def __init__(self, hidden: int, heads: int, head_dim: int, norm_eps: float, act: Activation = "silu"):
        super().__init__()
        self.heads = heads
        self.act: Activation = act
        width = heads * head_dim
        self.query = nn.Linear(hidden, width, bias=False)
        self.key = nn.Linear(hidden, width, bias=False)
        self.value = nn.Linear(hidden, width, bias=False)
        self.gate = nn.Linear(hidden, width, bias=False)
        self.register_buffer("slope", torch.empty(heads))
        self.norm = RMSNorm(width, norm_eps)
        self.output = nn.Linear(width, hidden, bias=False)

    def reset_parameters(self, std: float) -> None:
        for linear in (self.query, self.key, self.value, self.gate, self.output):
            reset_linear(linear, std)
        with torch.no_grad():
            self.slope.copy_(2.0 ** (-8.0 / self.heads * torch.arange(1, self.heads + 1)))

    def forward(self, x: Tensor, context: Context) -> Tensor:
        act = activation(self.act)
        projections = (self.query, self.key, self.value)
        query, key, value = (act(part(x)).unflatten(-1, (self.heads, -1)) for part in projections)
        decay = -self.slope.to(torch.promote_types(x.dtype, torch.float32))[None, :, None].expand(len(x), -1, 1)
        mixed = decayed_linear_attention(query, key, value, decay, context.lengths).flatten(-2)
        return self.output(self.norm(mixed) * torch.sigmoid(self.gate(x)))
