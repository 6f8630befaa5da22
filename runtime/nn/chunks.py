"""Documents cut into chunks, so that a recurrence runs over chunks and all tokens of a chunk are computed at once."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Chunks:
    """Every document in pieces of `size` tokens, the last one filled up with zeros.

    Chunks stand in steps: the first chunk of every document, longest document first, then the second chunks, and so on.
    The n-th chunk of a step continues the n-th of the step before, so a state carried along is cut to `state[:count]`.

    index: [M, size] int64, the token at each place, T where there is none. place: [T] int64, each token's place among
    the M * size. steps: the number of chunks of each step, never rising. first, last: the places of the first and the
    last document in the order of a step.
    """

    size: int
    index: Tensor
    place: Tensor
    steps: tuple[int, ...]
    first: int
    last: int

    def cut(self, x: Tensor) -> Tensor:
        """[T, ...] -> [M, size, ...], zeros where a chunk is longer than its document."""
        filled = torch.cat([x, x.new_zeros(1, *x.shape[1:])])
        return filled.index_select(0, self.index.flatten()).unflatten(0, self.index.shape)

    def started(self, zeros: Tensor, state: Tensor) -> Tensor:
        """zeros: the states of all documents before their first chunks; with `state` for the first document."""
        return torch.cat([zeros[: self.first], state[None], zeros[self.first + 1 :]])

    def join(self, x: Tensor) -> Tensor:
        """[M, size, ...] -> [T, ...], the inverse of `cut`."""
        return x.flatten(0, 1).index_select(0, self.place)


def chunks_of(lengths: tuple[int, ...], size: int, device: torch.device) -> Chunks:
    """Chunks of `size` tokens, a power of two; of fewer, also a power of two, where no document is that long."""
    longest = max(lengths, default=0)
    while size >= 2 * longest and size > 1:
        size //= 2
    lengths_D = torch.tensor(lengths, dtype=torch.int64)
    starts_D = lengths_D.cumsum(0) - lengths_D
    order_D = torch.argsort(lengths_D, descending=True, stable=True)
    within = torch.arange(size)
    rows, steps, total = [], [], sum(lengths)
    for first in range(0, longest, size):
        count = int((lengths_D > first).sum())
        left_n = (lengths_D[order_D[:count]] - first)[:, None]
        token_nC = starts_D[order_D[:count]][:, None] + first + within
        rows.append(torch.where(within < left_n, token_nC, total))
        steps.append(count)
    index = torch.cat(rows) if rows else torch.zeros(0, size, dtype=torch.int64)
    place = torch.empty(total + 1, dtype=torch.int64)
    place[index.flatten()] = torch.arange(index.numel())
    ends = [order_D.tolist().index(document) if lengths else 0 for document in (0, len(lengths) - 1)]
    return Chunks(size, index.to(device), place[:total].to(device), tuple(steps), *ends)
