"""Documents of a batch whose tokens lie on several ranks, each rank having some consecutive ones."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from dayzero.runtime.rows import Span, gather


class Piece(NamedTuple):
    """A part of a document on one rank. first: its place in the document; length: its tokens; start, whole: where the
    document begins in the batch, and its own length."""

    first: int
    length: int
    start: int
    whole: int


class Cut(tuple[int, ...]):
    """The lengths of this rank's pieces, in order, with what they are pieces of.

    It stands where lengths of documents do. What ignores it would take pieces for documents: blocks say in
    `context_parallel` that all they compute with heeds it.
    """

    span: Span
    whole: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def before(self) -> int:
        """Tokens of this rank's first document that other ranks have, before it."""
        return self.pieces[0].first

    def continued(self, rank: int) -> bool:
        """Whether the first token of a rank continues the document of the rank before."""
        row = sum(self.span.sizes[:rank])
        return row not in _starts(self.whole)

    def last_is_first(self, rank: int) -> bool:
        """Whether a rank has tokens of one document only."""
        row = sum(self.span.sizes[:rank])
        return not any(row < start < row + self.span.sizes[rank] for start in _starts(self.whole))


def _starts(lengths: Sequence[int]) -> list[int]:
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    return starts[:-1]


def cut(lengths: Sequence[int], span: Span) -> Cut:
    """Raises ValueError if a rank has no tokens."""
    if not all(span.sizes):
        raise ValueError(f"{sum(span.sizes)} tokens are too few for the {len(span.sizes)} ranks that share them")
    first, end = span.first, span.first + span.size
    pieces, start = [], 0
    for length in lengths:
        low, high = max(first, start), min(end, start + length)
        if low < high:
            pieces.append(Piece(low - start, high - low, start, length))
        start += length
    made = Cut(piece.length for piece in pieces)
    made.span, made.whole, made.pieces = span, tuple(lengths), tuple(pieces)
    return made


def rows_before(x: Tensor, lengths: Cut, count: int) -> Tensor:
    """The last `count` rows before this rank's first that belong to its document, fewer if there are fewer.

    x: [T, ...] of this rank -> [0 .. count, ...]."""
    if count == 0:
        return x[:0]
    sizes = tuple(min(count, size) for size in lengths.span.sizes)
    span = Span(lengths.span.group, sizes, lengths.span.index)
    ends = gather(x[x.shape[0] - span.size :], span)
    wanted = min(count, lengths.before)
    return ends[span.first - wanted : span.first]


def carried(
    own: Sequence[Tensor],
    start: Sequence[Tensor],
    follow: Callable[[Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]],
    lengths: Cut,
) -> list[Tensor]:
    """The state before this rank's first token (Blelloch 1990: a scan over ranks).

    own: what this rank's last piece does to a state; follow(own, state): the state behind it; start: the state at the
    beginning of a document. All ranks gather what all others do, which is as large as a state, and none waits for
    another's result.
    """
    span = lengths.span
    ones = Span(span.group, (1,) * len(span.sizes), span.index)
    flat = torch.cat([part.flatten() for part in own])
    every = gather(flat[None], ones)
    shapes, sizes = [part.shape for part in own], [part.numel() for part in own]
    state = list(start)
    for rank in range(span.index):
        does = [part.view(shape) for part, shape in zip(every[rank].split(sizes), shapes, strict=True)]
        state = list(follow(does, state if lengths.continued(rank) and lengths.last_is_first(rank) else start))
    if not lengths.continued(span.index):
        state = list(start)
    # Every rank has a part in the backward pass of the gathering, also one that nothing is carried to.
    nothing = (every * 0.0).sum()
    return [part + nothing for part in state]
