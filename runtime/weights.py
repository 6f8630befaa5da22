"""Weight rules: where each parameter of the model comes from in the checkpoint, readable in both directions.

A rule names a parameter and an expression over checkpoint tensors. The expression tree is a bijection: `read` makes
any region of the parameter from just the bytes it needs, and `write` gives back the checkpoint's tensors, with their
own names and shapes. Names may hold `{layer}` and `{expert}`; a rule stands for all values of its ranges.
"""

import itertools
import string
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

Region = tuple[slice, ...]
Shape = tuple[int, ...]


class Reader(Protocol):
    def read(self, name: str, region: Region | None = None) -> Tensor: ...


class Source(Protocol):
    """A node of the expression: what a parameter, or a part of it, is made of."""

    def names(self, index: Mapping[str, int]) -> Iterator[str]:
        """Every checkpoint tensor below this node."""
        ...

    def shape(self, shapes: Mapping[str, Shape], index: Mapping[str, int]) -> Shape:
        """Shape of the result. Raises ValueError if the parts do not fit together, KeyError for a missing tensor."""
        ...

    def read(self, reader: Reader, shapes: Mapping[str, Shape], index: Mapping[str, int], region: Region) -> Tensor:
        """The region of the result, reading only what it needs. `region`: one slice with int bounds a dimension."""
        ...

    def write(
        self, value: Tensor, shapes: Mapping[str, Shape], index: Mapping[str, int], region: Region
    ) -> Iterator[tuple[str, Region, Tensor]]:
        """Inverse of read: which region of which checkpoint tensor holds which part of `value`."""
        ...


@dataclass(frozen=True)
class Stored:
    """A checkpoint tensor as it is. `name` may hold index placeholders: `model.layers.{layer}.norm.weight`."""

    name: str

    def names(self, index):
        yield self.name.format_map(index)

    def shape(self, shapes, index):
        return shapes[self.name.format_map(index)]

    def read(self, reader, shapes, index, region):
        return reader.read(self.name.format_map(index), region)

    def write(self, value, shapes, index, region):
        yield self.name.format_map(index), region, value


@dataclass(frozen=True)
class Stack:
    """One part for each value 0 .. count-1 of the index `over`, along a new first dimension."""

    over: str
    count: int
    part: Source

    def _each(self, index, start=0, stop=None):
        for value in range(start, self.count if stop is None else stop):
            yield value, {**index, self.over: value}

    def names(self, index):
        for _, inner in self._each(index):
            yield from self.part.names(inner)

    def shape(self, shapes, index):
        found = {self.part.shape(shapes, inner) for _, inner in self._each(index)}
        if len(found) != 1:
            names = next(self.part.names({**index, self.over: 0}))
            raise ValueError(f"{names} and its siblings over {self.over} have different shapes: {sorted(found)}")
        return (self.count, *found.pop())

    def read(self, reader, shapes, index, region):
        rows = self._each(index, region[0].start, region[0].stop)
        parts = [self.part.read(reader, shapes, inner, region[1:]) for _, inner in rows]
        if not parts:
            shape = [part.stop - part.start for part in region]
            return torch.empty(shape)
        return torch.stack(parts)

    def write(self, value, shapes, index, region):
        for row, (_, inner) in enumerate(self._each(index, region[0].start, region[0].stop)):
            yield from self.part.write(value[row], shapes, inner, region[1:])


@dataclass(frozen=True)
class Concat:
    """Parts one after the other along `dim`."""

    dim: int
    parts: tuple[Source, ...]

    def names(self, index):
        for part in self.parts:
            yield from part.names(index)

    def shape(self, shapes, index):
        found = [part.shape(shapes, index) for part in self.parts]
        rests = {(*shape[: self.dim], *shape[self.dim + 1 :]) for shape in found}
        if len(rests) != 1:
            raise ValueError(f"{next(self.names(index))} and its neighbours do not fit side by side: {found}")
        total = sum(shape[self.dim] for shape in found)
        return (*found[0][: self.dim], total, *found[0][self.dim + 1 :])

    def _overlaps(self, shapes, index, region):
        """(part, region within the part, slice within `region`'s own length) for each part that `region` touches."""
        start = 0
        for part in self.parts:
            size = part.shape(shapes, index)[self.dim]
            low, high = max(region[self.dim].start, start), min(region[self.dim].stop, start + size)
            if low < high:
                inner = (*region[: self.dim], slice(low - start, high - start), *region[self.dim + 1 :])
                yield part, inner, (low - region[self.dim].start, high - low)
            start += size

    def read(self, reader, shapes, index, region):
        parts = [part.read(reader, shapes, index, inner) for part, inner, _ in self._overlaps(shapes, index, region)]
        if not parts:
            return torch.empty([part.stop - part.start for part in region])
        return torch.cat(parts, self.dim)

    def write(self, value, shapes, index, region):
        for part, inner, (start, length) in self._overlaps(shapes, index, region):
            yield from part.write(value.narrow(self.dim, start, length), shapes, index, inner)


@dataclass(frozen=True)
class Transpose:
    """The last two dimensions swapped."""

    part: Source

    def names(self, index):
        yield from self.part.names(index)

    def shape(self, shapes, index):
        *rest, rows, columns = self.part.shape(shapes, index)
        return (*rest, columns, rows)

    def read(self, reader, shapes, index, region):
        inner = (*region[:-2], region[-1], region[-2])
        return self.part.read(reader, shapes, index, inner).transpose(-1, -2)

    def write(self, value, shapes, index, region):
        inner = (*region[:-2], region[-1], region[-2])
        yield from self.part.write(value.transpose(-1, -2), shapes, index, inner)


@dataclass(frozen=True)
class Rule:
    """`parameter` is made of `source`, for every combination of the values in `ranges` (placeholder -> range)."""

    parameter: str
    source: Source
    ranges: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def each(self) -> Iterator[tuple[str, dict[str, int]]]:
        """(parameter name, index values) of every parameter that the rule stands for."""
        used = [name for _, name, _, _ in string.Formatter().parse(self.parameter) if name]
        for values in itertools.product(*(self.ranges[name] for name in used)):
            index = dict(zip(used, values, strict=True))
            yield self.parameter.format_map(index), index


@dataclass(frozen=True)
class BoundRule:
    """A rule for one parameter, with its index values filled in."""

    parameter: str
    source: Source
    index: Mapping[str, int]

    def names(self) -> list[str]:
        return list(self.source.names(self.index))

    def shape(self, shapes: Mapping[str, Shape]) -> Shape:
        return tuple(self.source.shape(shapes, self.index))

    def read(self, reader: Reader, shapes: Mapping[str, Shape], region: Region | None = None) -> Tensor:
        return self.source.read(reader, shapes, self.index, region or whole(self.shape(shapes)))

    def write(
        self, value: Tensor, shapes: Mapping[str, Shape], region: Region | None = None
    ) -> Iterator[tuple[str, Region, Tensor]]:
        return self.source.write(value, shapes, self.index, region or whole(self.shape(shapes)))


def whole(shape: Shape) -> Region:
    """The region that is all of a tensor of this shape."""
    return tuple(slice(0, size) for size in shape)


def bind(rules: Sequence[Rule]) -> dict[str, BoundRule]:
    """Parameter name -> its rule. Raises ValueError if two rules make the same parameter, or read the same tensor."""
    bound: dict[str, BoundRule] = {}
    owner: dict[str, str] = {}
    for rule in rules:
        for parameter, index in rule.each():
            if parameter in bound:
                raise ValueError(f"two rules make {parameter}")
            bound[parameter] = BoundRule(parameter, rule.source, index)
            for name in bound[parameter].names():
                if name in owner:
                    raise ValueError(f"{name} is read for both {owner[name]} and {parameter}")
                owner[name] = parameter
    return bound
