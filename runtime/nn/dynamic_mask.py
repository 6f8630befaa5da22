"""Softmax attention that keeps, for each token, the keys whose own values say that they matter (Dynamic Mask Attention,
Shi et al. 2025, arXiv:2508.02124)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attend import Bias, attend, visible_keys
from .attention import GroupedQueryAttention
from .context import Context
from .linear import reset_linear


class DynamicMaskAttention(nn.Module):
    """`attention` with a learned number for each key, added to its scores.  x: [T, H] -> [T, H].

        n_s = exp(rate * softplus(step v_s))    [T, G]; v_s: the values of all G heads of the token, side by side
        query t attends to the `keep` tokens of the largest n among those that it sees, with scores + n.

    The number is that of a key/value head and the query heads that share it. It is computed in float32 at least.
    attention: it neither takes nor leaves keys. Of keys with equal numbers, such as those of equal tokens in a first
    layer, any may be kept.
    """

    uses_context = True
    lora_targets = ("step",)

    def __init__(self, attention: GroupedQueryAttention, keep: int, bias: bool = False):
        super().__init__()
        if keep < 1:
            raise ValueError(f"attention to {keep} keys sees nothing")
        self.attention, self.keep = attention, keep
        self.step = nn.Linear(attention.kv_heads * attention.value_dim, attention.kv_heads, bias=bias)
        self.rate = nn.Parameter(torch.empty(attention.kv_heads))

    def reset_parameters(self, std: float) -> None:
        reset_linear(self.step, std)
        nn.init.zeros_(self.rate)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        attention = self.attention
        query, key, value = attention.projections(x, context)
        query, key = attention.positioned(query, key, context)
        attended = attend(
            query,
            key,
            value,
            context.lengths,
            attention.scale,
            attention.visible,
            attention.softcap,
            attention.sinks,
            self._kept(self.numbers(value)),
        )
        return attention.output(attention.gated(attended, x).flatten(-2))

    def numbers(self, value: Tensor) -> Tensor:
        """value: [T, G, Dv] -> [T, G]."""
        steps = self.step(value.flatten(-2))
        compute = torch.promote_types(steps.dtype, torch.float32)
        return torch.exp(self.rate.to(compute) * F.softplus(steps.to(compute)))

    def _kept(self, numbers: Tensor) -> Bias:
        """As `attend` asks for it: the number of each key, or -inf where the query does not keep it."""
        shared_by = self.attention.heads // self.attention.kv_heads

        def of(first: int, age: Tensor) -> Tensor:
            keys = first - age[0]  # their rows in the batch
            added = numbers[keys].t()[:, None].expand(-1, *age.shape)  # [G, Q, K]
            if age.shape[1] > self.keep:
                visible = visible_keys(age, self.attention.visible)
                among = added.detach() if visible is None else added.detach().masked_fill(~visible, float("-inf"))
                best = among.topk(self.keep, dim=-1, sorted=False).indices
                others = torch.ones_like(among, dtype=torch.bool).scatter(-1, best, False)
                added = added.masked_fill(others, float("-inf"))
            return added.repeat_interleave(shared_by, 0)

        return of
