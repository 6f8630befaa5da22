"""The same values under another shape."""

from dataclasses import dataclass

from dayzero.runtime.weights.node import Node, along, as_range, as_slice, intersect, positions


@dataclass(frozen=True)
class Transpose(Node):
    """The last two dimensions swapped."""

    part: Node

    def shape(self, shapes, index):
        *rest, rows, columns = self.part.shape(shapes, index)
        return (*rest, columns, rows)

    def pieces(self, value, shapes, index, region):
        inner = (*region[:-2], region[-1], region[-2])
        yield from self.part.pieces(value.transpose(-1, -2), shapes, index, inner)


@dataclass(frozen=True)
class Squeeze(Node):
    """Without the dimensions `dims` of the part, which have one element: [1, 1, H, 1] without (0, 1, 3) is [H]."""

    dims: tuple[int, ...]
    part: Node

    def shape(self, shapes, index):
        found = self.part.shape(shapes, index)
        if any(found[dim] != 1 for dim in self.dims):
            raise ValueError(f"{next(self.names(index))} {list(found)} has more than one element in {self.dims}")
        return tuple(size for dim, size in enumerate(found) if dim not in self.dims)

    def pieces(self, value, shapes, index, region):
        inner = list(region)
        for dim in sorted(self.dims):
            inner.insert(dim, slice(0, 1))
            value = value.unsqueeze(dim)
        yield from self.part.pieces(value, shapes, index, tuple(inner))


@dataclass(frozen=True)
class Unsqueeze(Node):
    """With dimensions of one element at `dims` of the result."""

    dims: tuple[int, ...]
    part: Node

    def shape(self, shapes, index):
        found = list(self.part.shape(shapes, index))
        for dim in sorted(self.dims):
            found.insert(dim, 1)
        return tuple(found)

    def pieces(self, value, shapes, index, region):
        if value.numel():
            at = tuple(0 if dim in self.dims else slice(None) for dim in range(value.ndim))
            inner = tuple(part for dim, part in enumerate(region) if dim not in self.dims)
            yield from self.part.pieces(value[at], shapes, index, inner)


@dataclass(frozen=True)
class Flatten(Node):
    """Dimensions `dim` and `dim` + 1 of the part as one: [E, F, D] is [E*F, D]."""

    dim: int
    part: Node

    def shape(self, shapes, index):
        found = self.part.shape(shapes, index)
        if len(found) < self.dim + 2:
            raise ValueError(f"{next(self.names(index))} {list(found)} has no dimension {self.dim + 1}")
        return (*found[: self.dim], found[self.dim] * found[self.dim + 1], *found[self.dim + 2 :])

    def pieces(self, value, shapes, index, region):
        width = self.part.shape(shapes, index)[self.dim + 1]
        numbers = as_range(region[self.dim])
        if not value.numel():
            return
        for outer, inner in _rows(numbers, width):
            joined = range(outer[0] * width + inner.start, outer[-1] * width + inner.stop, inner.step)
            view = value[(slice(None),) * self.dim + (positions(joined, numbers),)]
            view = view.unflatten(self.dim, (len(outer), len(inner)))
            where = (*region[: self.dim], as_slice(outer), as_slice(inner), *region[self.dim + 1 :])
            yield from self.part.pieces(view, shapes, index, where)


def _rows(numbers: range, width: int):
    """(outer, inner) ranges whose products are the numbers: the rows in full at once, the others one by one."""
    if numbers.step == 1:
        first, last = -(-numbers.start // width), numbers.stop // width
        if first < last:
            ends = range(numbers.start, first * width), range(last * width, numbers.stop)
            yield from _rows(ends[0], width)
            yield range(first, last), range(width)
            yield from _rows(ends[1], width)
            return
    if not len(numbers):
        return
    for outer in range(numbers[0] // width, numbers[-1] // width + 1):
        common = intersect(numbers, range(outer * width, (outer + 1) * width))
        if len(common):
            first = common[0] - outer * width
            yield range(outer, outer + 1), range(first, common[-1] + 1 - outer * width, common.step)


@dataclass(frozen=True)
class Unflatten(Node):
    """Dimension `dim` of the part as `count` blocks of it: [E*F, D] is [E, F, D]."""

    dim: int
    count: int
    part: Node

    def shape(self, shapes, index):
        found = self.part.shape(shapes, index)
        if found[self.dim] % self.count:
            raise ValueError(f"{next(self.names(index))} {list(found)} does not fall into {self.count}")
        return (*found[: self.dim], self.count, found[self.dim] // self.count, *found[self.dim + 1 :])

    def pieces(self, value, shapes, index, region):
        dim = self.dim
        width = self.part.shape(shapes, index)[dim] // self.count
        outer, inner = as_range(region[dim]), as_range(region[dim + 1])
        rest = (*region[:dim], slice(0, 0), *region[dim + 2 :])
        if not value.numel():
            return
        in_full = inner == range(width) and outer.step == 1
        if in_full and value.stride(dim) == value.shape[dim + 1] * value.stride(dim + 1):
            numbers = range(outer.start * width, outer.stop * width)
            yield from self.part.pieces(value.flatten(dim, dim + 1), shapes, index, along(rest, dim, numbers))
        elif len(inner) < len(outer):
            for position, number in enumerate(inner):
                numbers = range(outer.start * width + number, outer[-1] * width + number + 1, outer.step * width)
                yield from self.part.pieces(value.select(dim + 1, position), shapes, index, along(rest, dim, numbers))
        else:
            for position, number in enumerate(outer):
                numbers = range(number * width + inner.start, number * width + inner[-1] + 1, inner.step)
                yield from self.part.pieces(value.select(dim, position), shapes, index, along(rest, dim, numbers))
