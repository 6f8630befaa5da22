"""The same rows in another order: what alternates in the file and stands apart in the parameter, or the other way."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from dayzero.runtime.weights.node import Node, Piece, Region, along, as_range, intersect, positions

Runs = Iterator[tuple[range, range]]


def pieces_along(node: Node, dim: int, runs: Runs, value: Tensor, shapes, index, region: Region) -> Iterator[Piece]:
    """Pieces of `node` where dimension `dim` is (numbers in the result, numbers in the node) runs of equal length."""
    numbers = as_range(region[dim])
    for result, inner in runs:
        common = intersect(numbers, result)
        if len(common):
            view = value[(slice(None),) * dim + (positions(common, numbers),)]
            at = positions(common, result)
            yield from node.pieces(view, shapes, index, along(region, dim, inner[at]))


def _alternating(size: int, ways: int, block: int | None) -> Runs:
    """(apart, alternating) numbers of `ways` streams in each block."""
    block = block or size
    each = block // ways
    for start in range(0, size, block):
        for way in range(ways):
            first = start + way * each
            yield range(first, first + each), range(start + way, start + block, ways)


def _check(node: "Deinterleave | Interleave", shape: tuple[int, ...]) -> None:
    size = shape[node.dim]
    if size % (node.block or size or 1) or (node.block or size) % node.ways:
        raise ValueError(f"{size} rows are not blocks of {node.block or size} in which {node.ways} alternate")


@dataclass(frozen=True)
class Deinterleave(Node):
    """`ways` streams that alternate along `dim` in the file, one after the other in the parameter.

    gate0 up0 gate1 up1 ... becomes gate0 gate1 ... up0 up1 ... (gpt-oss' fused experts). block: the streams alternate
    within each block of so many rows, so with `ways` 2 and the head size, rotary pairs become rotary halves.
    """

    dim: int
    ways: int
    part: Node
    block: int | None = None

    def shape(self, shapes, index):
        found = self.part.shape(shapes, index)
        _check(self, found)
        return found

    def pieces(self, value, shapes, index, region):
        runs = _alternating(self.shape(shapes, index)[self.dim], self.ways, self.block)
        yield from pieces_along(self.part, self.dim, runs, value, shapes, index, region)


@dataclass(frozen=True)
class Interleave(Node):
    """The inverse of `Deinterleave`: `ways` streams one after the other in the file, alternating in the parameter."""

    dim: int
    ways: int
    part: Node
    block: int | None = None

    def shape(self, shapes, index):
        found = self.part.shape(shapes, index)
        _check(self, found)
        return found

    def pieces(self, value, shapes, index, region):
        runs = _alternating(self.shape(shapes, index)[self.dim], self.ways, self.block)
        swapped = ((alternating, apart) for apart, alternating in runs)
        yield from pieces_along(self.part, self.dim, swapped, value, shapes, index, region)
