"""Softmax attention with a learned number for each head and bucket of distances (T5: Raffel et al. 2020,
arXiv:1910.10683)."""

import math

import torch
from torch import Tensor, nn

from .attend import Bias
from .attention import GroupedQueryAttention
from .context import Context

BIAS = "distance_bias"  # Context.shared: [2 L - 1, N], for keys that are L - 1 later .. L - 1 earlier than their query


class DistanceBiasedAttention(nn.Module):
    """`attention` with a bias by distance, which one layer makes and leaves for those after it.  x: [T, H] -> [T, H].

    buckets: rows of a table [buckets, N] of biases, None for a layer that takes what an earlier one left. Half of the
    buckets are for keys after their query where `both_ways`; of the rest, half stand for one distance each, and the
    others for distances that grow geometrically up to max_distance, and all that are beyond.
    """

    uses_context = True

    def __init__(
        self,
        attention: GroupedQueryAttention,
        buckets: int | None = None,
        max_distance: int = 0,
        both_ways: bool = False,
    ):
        super().__init__()
        self.attention = attention
        self.buckets, self.max_distance, self.both_ways = buckets, max_distance, both_ways
        self.table = nn.Parameter(torch.empty(buckets, attention.heads)) if buckets is not None else None

    def reset_parameters(self, std: float) -> None:
        if self.table is not None:
            nn.init.normal_(self.table, std=std)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.table is not None:
            context.shared[BIAS] = self.by_age(max(context.lengths, default=1) or 1, self.table)
        if BIAS not in context.shared:
            raise ValueError("this attention reads the bias of an earlier layer, but none has left one")
        return self.attention(x, context, _bias(context.shared[BIAS]))

    def by_age(self, length: int, table: Tensor) -> Tensor:
        """[2 length - 1, N]: the biases of keys from length - 1 places later to length - 1 places earlier."""
        age = torch.arange(1 - length, length, device=table.device)
        dtype = torch.promote_types(table.dtype, torch.float32)
        return table[bucket_of(age, self.buckets or 0, self.max_distance, self.both_ways, dtype)]


def bucket_of(age: Tensor, buckets: int, max_distance: int, both_ways: bool, dtype: torch.dtype) -> Tensor:
    """The bucket of each age (how many places a key precedes its query), int64. dtype: of the logarithm."""
    first = torch.zeros_like(age)
    if both_ways:
        buckets //= 2
        first = (age < 0) * buckets
        age = age.abs()
    else:
        age = age.clamp(min=0)
    single = buckets // 2
    ratio = age.clamp(min=1).to(dtype) / single
    grown = torch.log(ratio) / math.log(max_distance / single) * (buckets - single)
    far = (single + grown.to(torch.int64)).clamp(max=buckets - 1)
    return first + torch.where(age < single, age, far)


def _bias(by_age: Tensor) -> Bias:
    """As `attend` asks for it."""
    middle = by_age.shape[0] // 2

    def of(first: int, age: Tensor) -> Tensor:
        return by_age[(age + middle).clamp(0, 2 * middle)].permute(2, 0, 1)

    return of
