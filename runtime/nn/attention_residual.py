"""Attention over depth: what a block reads is a mixture of what earlier blocks left (Kimi team 2026, "Attention
Residuals", arXiv:2603.15031)."""

import torch
from torch import Tensor, nn

from .norm import RMSNorm


class AttentionResidual(nn.Module):
    """states: n >= 1 tensors [T, H] -> [T, H], or `queries` of them as a tuple where there are several; as many for
    each of `sets`, one set after the other.

        y_q = sum_i softmax_i(scale * query_q . k_i) v_i,  k_i = rms(state_i) * norm.weight

    v_i is the state itself, or k_i where `normed_values`. weighted: whether the norm has a weight. query: [H],
    [queries, H] or [sets, queries, H]. Each token attends to its own states only: packed documents need no mask. In
    float32 at least.
    """

    def __init__(
        self,
        hidden: int,
        eps: float,
        scale: float = 1.0,
        queries: int = 1,
        weighted: bool = True,
        normed_values: bool = False,
        sets: int | None = None,
    ):
        super().__init__()
        self.scale, self.queries, self.normed_values = scale, queries, normed_values
        self.norm = RMSNorm(hidden, eps, scaled=weighted)
        shape = (hidden,) if queries == 1 else (queries, hidden)
        self.query = nn.Parameter(torch.empty(shape if sets is None else (sets, queries, hidden)))

    def reset_parameters(self, std: float) -> None:
        # A query of zeros takes the mean of all states.
        nn.init.zeros_(self.query)

    def forward(self, *states: Tensor) -> Tensor | tuple[Tensor, ...]:
        dtype = states[-1].dtype
        wide = torch.promote_types(dtype, torch.float32)
        stack = torch.stack(states, 1).to(wide)  # [T, n, H]
        keys = self.norm(stack)
        scores = keys @ self.query.to(wide).view(-1, keys.shape[-1]).t() * self.scale  # [T, n, queries]
        mixed = scores.softmax(1).transpose(1, 2) @ (keys if self.normed_values else stack)
        out = mixed.to(dtype).unbind(1)
        return out if len(out) > 1 else out[0]
