"""A part of a stored tensor: some of its rows, whose others are another parameter's, or padding."""

from dataclasses import dataclass

from dayzero.runtime.weights.node import EXCERPT, PART, WHOLE, Node, as_range, replace_role
from dayzero.runtime.weights.order import pieces_along


@dataclass(frozen=True)
class Part(Node):
    """Rows start .. stop-1 of dimension `dim`, or of each of `groups` equal blocks of it, one block after the other.

    The other rows are read elsewhere. [q | k | v] in one tensor is three parts; where every head or group has its own
    q, k and v together (Qwen3-Next's `in_proj_qkvz`, the gate beside the query in `q_proj`), `groups` is their number.
    """

    dim: int
    start: int
    stop: int
    part: Node
    groups: int = 1

    def leaves(self, index, partial=WHOLE):
        yield from self.part.leaves(index, max(partial, PART))

    def shape(self, shapes, index):
        found = self.part.shape(shapes, index)
        each, left = divmod(found[self.dim], self.groups)
        if left or not 0 <= self.start < self.stop <= each:
            name = next(self.names(index))
            raise ValueError(f"{name} {list(found)} has no rows {self.start}:{self.stop} in {self.groups} groups")
        return (*found[: self.dim], self.groups * (self.stop - self.start), *found[self.dim + 1 :])

    def pieces(self, value, shapes, index, region):
        each = self.part.shape(shapes, index)[self.dim] // self.groups
        width = self.stop - self.start
        runs = (
            (range(g * width, (g + 1) * width), range(g * each + self.start, g * each + self.stop))
            for g in range(self.groups)
        )
        yield from pieces_along(self.part, self.dim, runs, value, shapes, index, region)


@dataclass(frozen=True)
class Excerpt(Part):
    """A part of a tensor whose other rows no parameter needs: they stay what they are, as whole tensors do that are
    carried through. One row of a bias that text and images share is one."""

    def leaves(self, index, partial=WHOLE):
        yield from self.part.leaves(index, EXCERPT)


@dataclass(frozen=True)
class Trim(Node):
    """The first `size` rows of dimension `dim`; the file holds zeros after them, which come back on writing."""

    dim: int
    size: int
    part: Node

    def leaves(self, index, partial=WHOLE):
        yield from self.part.leaves(index, max(partial, PART))

    def shape(self, shapes, index):
        found = self.part.shape(shapes, index)
        if self.size > found[self.dim]:
            raise ValueError(f"{next(self.names(index))} {list(found)} has fewer than {self.size} rows")
        return (*found[: self.dim], self.size, *found[self.dim + 1 :])

    def pieces(self, value, shapes, index, region):
        yield from self.part.pieces(value, shapes, index, region)
        stored = self.part.shape(shapes, index)[self.dim]
        rows = as_range(region[self.dim])
        if stored > self.size and len(rows) and rows[-1] == self.size - 1:  # whoever has the last row has the padding
            beyond = (*region[: self.dim], slice(self.size, stored), *region[self.dim + 1 :])
            nothing = value.new_zeros([len(as_range(part)) for part in beyond])
            for piece in self.part.pieces(nothing, shapes, index, beyond):
                yield replace_role(piece, "padding")
