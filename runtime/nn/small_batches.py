"""Many experts with few rows each: one padded batch in place of as many tiny products."""

from collections.abc import Callable

import torch
from torch import Tensor

from .permutation import Compute, collect, spread


def merged(x: Tensor, counts: Tensor, limit: int, in_groups: Compute, in_a_batch: Callable[[Tensor], Tensor]) -> Tensor:
    """in_groups(x, counts), where each expert's first `limit` rows go through in_a_batch.  [M, H] -> [M, H].

    x: [M, H] sorted by expert, counts: [E], together M. in_a_batch(rows [E, P, H]) -> [E, P, H] computes every expert's
    rows at once; its P is `limit`, or the largest count where that is less. Waits for the device.
    """
    experts = counts.shape[0]
    height = min(limit, int(counts.max()))
    if height == 0:
        return in_groups(x, counts)
    row = torch.arange(x.shape[0], device=x.device)
    expert = torch.arange(experts, device=x.device).repeat_interleave(counts, output_size=x.shape[0])
    place = row - (counts.cumsum(0) - counts).index_select(0, expert)
    first = place < height
    target = (expert * height + place)[first]
    few = row[first]
    batch = collect(spread(x, few), target, experts * height).view(experts, height, -1)
    y = spread(in_a_batch(batch).flatten(0, 1), target)
    if few.shape[0] == x.shape[0]:
        return y
    others = row[~first]
    rest = in_groups(spread(x, others), (counts - height).clamp(min=0))
    return collect(torch.cat((y, rest)), torch.cat((few, others)), x.shape[0])
