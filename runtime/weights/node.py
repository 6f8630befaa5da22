"""What every node of a weight expression is: a shape, a dtype, and pieces, each a region of one stored tensor."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

WHOLE, PART, EXCERPT = 0, 1, 2  # how much of what is stored an expression takes: see `Node.leaves`
Region = tuple[slice, ...]  # one slice a dimension, int bounds, a positive step or none
Shape = tuple[int, ...]
Index = Mapping[str, int]
Shapes = Mapping[str, Shape]


class Reader(Protocol):
    def read(self, name: str, region: Region | None = None) -> Tensor: ...

    def dtype(self, name: str) -> torch.dtype: ...


def copy(into: Tensor, data: Tensor) -> None:
    """The plain way to put data into its place."""
    into.copy_(data)


Put = Callable[[Tensor, Tensor], None]


@dataclass(frozen=True)
class Piece:
    """`region` of what `leaf` stands for, and `view`, the part of the parameter that it is; shapes are equal.

    role: "copy" for a tensor that repeats another piece, "padding" for one whose values must be zero and that is no
    part of the parameter. casts: dtypes that the values are rounded to on their way into the parameter, in order.
    """

    leaf: "Leaf"
    index: Index
    region: Region
    view: Tensor
    role: Literal["value", "copy", "padding"] = "value"
    casts: tuple[torch.dtype, ...] = ()

    def fill(self, reader: Reader, shapes: Shapes, put: Put = copy) -> int:
        """Reads the piece into `view` and returns the bytes read. put(place, data) writes data of `view`'s shape.

        Raises ValueError for padding that is not zero and for a copy that is none.
        """
        if self.role == "value":
            return self.leaf.fill(self, reader, shapes, put)
        found = torch.empty(self.view.shape, dtype=self.leaf.dtype(reader, self.index))
        read = self.leaf.fill(replace(self, view=found, role="value", casts=()), reader, shapes, copy)
        name = next(self.leaf.names(self.index))
        if self.role == "padding" and bool(found.count_nonzero()):
            raise ValueError(f"{name} has {int(found.count_nonzero())} values that are not 0 where padding belongs")
        for dtype in self.casts:
            found = found.to(dtype)
        if self.role == "copy" and not torch.equal(found.to(self.view.dtype), self.view.to(found.device)):
            raise ValueError(f"{name} differs from the tensor that it should repeat")
        return read


class Node:
    """Base of all expressions, which are frozen dataclasses with their parts in the fields `part` or `parts`."""

    @property
    def children(self) -> tuple["Node", ...]:
        """The expressions directly below this one."""
        if hasattr(self, "parts"):
            return tuple(self.parts)  # type: ignore[attr-defined]
        return (self.part,) if hasattr(self, "part") else ()  # type: ignore[attr-defined]

    def with_children(self, children: tuple["Node", ...]) -> "Node":
        """The same node over other expressions."""
        if not children:
            return self
        held = {"parts": children} if hasattr(self, "parts") else {"part": children[0]}
        return replace(self, **held)  # type: ignore[type-var]

    def renamed(self, change: Callable[[str], str]) -> "Node":
        """The same expression over other tensor names."""
        return self.with_children(tuple(child.renamed(change) for child in self.children))

    def settings(self) -> dict[str, Any]:
        """What the node holds beside its children, by field."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in {"part", "parts"}}  # type: ignore[arg-type]

    def leaves(self, index: Index, partial: int = WHOLE) -> Iterator[tuple["Leaf", Index, int]]:
        """(leaf, its index, how much of it is taken) for everything stored below this node: WHOLE, PART where other
        rules take the rest, EXCERPT where no rule has to."""
        for child in self.children:
            yield from child.leaves(index, partial)

    def names(self, index: Index) -> Iterator[str]:
        """Every checkpoint tensor below this node, the first of a leaf first; one that is read twice stands twice."""
        for leaf, inner, _ in self.leaves(index):
            yield from leaf.names(inner)

    def shape(self, shapes: Shapes, index: Index) -> Shape:
        """Shape of the result. Raises ValueError if the parts do not fit together, KeyError for a missing tensor."""
        raise NotImplementedError

    def dtype(self, reader: Reader, index: Index) -> torch.dtype:
        """The dtype that holds every part as it is read."""
        found = {leaf.dtype(reader, inner) for leaf, inner, _ in self.leaves(index)}
        return promoted(found)

    def pieces(self, value: Tensor, shapes: Shapes, index: Index, region: Region) -> Iterator[Piece]:
        """What `region` of the result is made of. value: of the region's shape; every piece's view is a view of it."""
        raise NotImplementedError

    def read(self, reader: Reader, shapes: Shapes, index: Index, region: Region) -> Tensor:
        """The region of the result, reading only what it needs."""
        value = torch.empty([len(as_range(part)) for part in region], dtype=self.dtype(reader, index))
        for piece in self.pieces(value, shapes, index, region):
            piece.fill(reader, shapes)
        return value


class Leaf(Node):
    """What is stored: one tensor, or the tensors of one quantised weight."""

    def names(self, index: Index) -> Iterator[str]:
        raise NotImplementedError

    def leaves(self, index: Index, partial: int = WHOLE) -> Iterator[tuple["Leaf", Index, int]]:
        yield self, index, partial

    def pieces(self, value: Tensor, shapes: Shapes, index: Index, region: Region) -> Iterator[Piece]:
        if value.numel():
            yield Piece(self, index, region, value)

    def fill(self, piece: Piece, reader: Reader, shapes: Shapes, put: Put) -> int:
        """Reads `piece` of this leaf into its view; the bytes read."""
        raise NotImplementedError


def promoted(dtypes: set[torch.dtype]) -> torch.dtype:
    """The narrowest dtype that holds all values of these."""
    made, *others = sorted(dtypes, key=str)
    for other in others:
        made = torch.promote_types(made, other)
    return made


def whole(shape: Shape) -> Region:
    """The region that is all of a tensor of this shape."""
    return tuple(slice(0, size) for size in shape)


def as_range(part: slice) -> range:
    return range(part.start, part.stop, part.step or 1)


def as_slice(numbers: range) -> slice:
    """The slice of these numbers, without a step where none is needed."""
    if len(numbers) <= 1 or numbers.step == 1:
        start = numbers.start if len(numbers) else 0
        return slice(start, start + len(numbers))
    return slice(numbers.start, numbers[-1] + 1, numbers.step)


def along(region: Region, dim: int, numbers: range) -> Region:
    """`region` with other numbers in dimension `dim`."""
    return (*region[:dim], as_slice(numbers), *region[dim + 1 :])


def positions(of: range, among: range) -> slice:
    """Where the numbers `of` stand in `among`, which has them all."""
    if not len(of):
        return slice(0, 0)
    start = (of.start - among.start) // among.step
    step = of.step // among.step if len(of) > 1 else 1
    return as_slice(range(start, start + len(of) * step, step))


def intersect(a: range, b: range) -> range:
    """The numbers that are in both ascending ranges."""
    if not len(a) or not len(b):
        return range(0)
    if a.step == b.step == 1:
        return range(max(a.start, b.start), max(min(a.stop, b.stop), a.start, b.start))
    shared = math.gcd(a.step, b.step)
    if (b.start - a.start) % shared:
        return range(0)
    step = a.step // shared * b.step
    times = (b.start - a.start) // shared * pow(a.step // shared, -1, b.step // shared) % (b.step // shared)
    first = a.start + a.step * times
    lowest = max(a.start, b.start)
    first += -(-(lowest - first) // step) * step
    return range(first, min(a.stop, b.stop), step)


def replace_role(piece: Piece, role: Literal["copy", "padding"]) -> Piece:
    """The piece in another role; padding of a copy stays padding."""
    return piece if piece.role == "padding" else replace(piece, role=role)
