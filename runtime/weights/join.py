"""Several parts as one: along a new dimension, or one after the other."""

from dataclasses import dataclass

from dayzero.runtime.weights.node import WHOLE, Node, along, as_range, intersect, positions


@dataclass(frozen=True)
class Stack(Node):
    """One part for each value 0 .. count-1 of the index `over`, along a new first dimension."""

    over: str
    count: int
    part: Node

    def leaves(self, index, partial=WHOLE):
        for value in range(self.count):
            yield from self.part.leaves({**index, self.over: value}, partial)

    def shape(self, shapes, index):
        found = {self.part.shape(shapes, {**index, self.over: value}) for value in range(self.count)}
        if len(found) != 1:
            names = next(self.part.names({**index, self.over: 0}))
            raise ValueError(f"{names} and its siblings over {self.over} have different shapes: {sorted(found)}")
        return (self.count, *found.pop())

    def pieces(self, value, shapes, index, region):
        for row, number in enumerate(as_range(region[0])):
            yield from self.part.pieces(value[row], shapes, {**index, self.over: number}, region[1:])


@dataclass(frozen=True)
class Concat(Node):
    """Parts one after the other along `dim`."""

    dim: int
    parts: tuple[Node, ...]

    def shape(self, shapes, index):
        found = [part.shape(shapes, index) for part in self.parts]
        rests = {(*shape[: self.dim], *shape[self.dim + 1 :]) for shape in found}
        if len(rests) != 1:
            raise ValueError(f"{next(self.names(index))} and its neighbours do not fit side by side: {found}")
        total = sum(shape[self.dim] for shape in found)
        return (*found[0][: self.dim], total, *found[0][self.dim + 1 :])

    def pieces(self, value, shapes, index, region):
        numbers, start = as_range(region[self.dim]), 0
        for part in self.parts:
            size = part.shape(shapes, index)[self.dim]
            common = intersect(numbers, range(start, start + size))
            if len(common):
                view = value[(slice(None),) * self.dim + (positions(common, numbers),)]
                inner = range(common.start - start, common.stop - start, common.step)
                yield from part.pieces(view, shapes, index, along(region, self.dim, inner))
            start += size
