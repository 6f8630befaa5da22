"""The tokens of a batch that several ranks work on together: each has some of the rows, and what moves them.

All gradients here follow one rule: a rank differentiates the part of the loss that is its own, and what a parameter or
an input gets is the sum over ranks. So the gradient of gathering is the sum of what every rank makes of the rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup


@dataclass(frozen=True)
class Span:
    """Consecutive rows dealt out to the ranks of `group`, in its order. sizes: rows of each; index: this rank's place.

    group: None where one rank has them all.
    """

    group: ProcessGroup | None
    sizes: tuple[int, ...]
    index: int

    @property
    def first(self) -> int:
        """The first row of this rank."""
        return sum(self.sizes[: self.index])

    @property
    def size(self) -> int:
        return self.sizes[self.index]

    @property
    def own(self) -> slice:
        return slice(self.first, self.first + self.size)


def even_span(rows: int, group: ProcessGroup | None) -> Span:
    """`rows` in parts that differ by one at most, the longer ones first; some are empty if there are too few."""
    if group is None:
        return Span(None, (rows,), 0)
    ranks = dist.get_world_size(group)
    return Span(group, tuple(rows // ranks + (rank < rows % ranks) for rank in range(ranks)), dist.get_rank(group))


def gather(x: Tensor, span: Span) -> Tensor:
    """[own rows, ...] -> [all rows, ...]. Raises ValueError for a tensor of other rows than the span's."""
    if x.shape[0] != span.size:
        raise ValueError(f"{x.shape[0]} rows of a batch of which this rank has {span.size}: is it another batch?")
    return _Gather.apply(x, span) if len(span.sizes) > 1 else x  # type: ignore[no-any-return]


def summed_rows(x: Tensor, span: Span) -> Tensor:
    """[all rows, ...], a part of the sum on each rank -> [own rows, ...] of the sum."""
    return _SummedRows.apply(x, span) if len(span.sizes) > 1 else x  # type: ignore[no-any-return]


def summed(x: Tensor, group: ProcessGroup | None) -> Tensor:
    """The sum over the ranks of the group, which all of them go on with."""
    return x if group is None else _Summed.apply(x, group)  # type: ignore[no-any-return]


def all_rows(x: Tensor, span: Span) -> Tensor:
    """`gather` without gradient."""
    longest = max(span.sizes)
    padded = x if x.shape[0] == longest else F.pad(x, (*(0, 0) * (x.ndim - 1), 0, longest - x.shape[0]))
    out = x.new_empty(len(span.sizes) * longest, *x.shape[1:])
    dist.all_gather_into_tensor(out, padded.contiguous(), group=span.group)
    if min(span.sizes) == longest:
        return out
    return torch.cat([part[:size] for part, size in zip(out.split(longest), span.sizes, strict=True)])


def own_of_sum(x: Tensor, span: Span) -> Tensor:
    """`summed_rows` without gradient."""
    longest = max(span.sizes)
    if min(span.sizes) != longest:
        x = torch.cat(_padded(x.split(span.sizes), longest))
    out = x.new_empty(longest, *x.shape[1:])
    dist.reduce_scatter_tensor(out, x.contiguous(), group=span.group)
    return out[: span.size]


def _padded(parts: Sequence[Tensor], rows: int) -> list[Tensor]:
    return [F.pad(part, (*(0, 0) * (part.ndim - 1), 0, rows - part.shape[0])) for part in parts]


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, span: Span) -> Tensor:
        ctx.span = span
        return all_rows(x, span)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return own_of_sum(grad, ctx.span), None


class _SummedRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, span: Span) -> Tensor:
        ctx.span = span
        return own_of_sum(x, span)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return all_rows(grad, ctx.span), None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(grad, group=ctx.group)
        return grad, None
