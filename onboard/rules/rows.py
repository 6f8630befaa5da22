"""Recognises how the rows of a parameter stand in a stored tensor: from which numbers to which expression.

A row order is a list: row i of the parameter is row `order[i]` of the tensor. Tried, plainest first: all of them, a run
of them, streams that alternate, the same for each of several groups, and a few of these one after the other.
"""

from collections.abc import Iterator, Sequence

from dayzero.runtime.weights import (
    Concat,
    Deinterleave,
    Flatten,
    Interleave,
    Part,
    Source,
    Squeeze,
    Transpose,
    Unflatten,
    Unsqueeze,
)

LONGEST = 8  # runs that make one parameter; more are no layout that anyone would write
SEARCHED = 128  # rows among which every cut is tried
Order = Sequence[int]


def rows_source(order: Order, size: int, dim: int, source: Source) -> Source | None:
    """The expression over `source`, `size` rows along `dim`, that has its rows in this order; None if none is known."""
    return _one(order, size, dim, source) or _several(order, size, dim, source)


def _one(order: Order, size: int, dim: int, source: Source) -> Source | None:
    first, count = min(order), len(order)
    straight = list(range(first, first + count))
    if list(order) == straight:
        return source if count == size else Part(dim, first, first + count, source)
    if sorted(order) == straight:
        inside = source if count == size else Part(dim, first, first + count, source)
        found = _alternating([number - first for number in order], dim, inside)
        if found is not None:
            return found
    return _stream(order, size, dim, source) or _grouped(order, size, dim, source)


def _alternating(order: Order, dim: int, source: Source) -> Source | None:
    count = len(order)
    for block in [count, *_divisors(count)]:
        for ways in _divisors(block):
            if not 1 < ways < block:
                continue
            each = block // ways
            apart = [
                start + j * ways + way for start in range(0, count, block) for way in range(ways) for j in range(each)
            ]
            together = [
                start + way * each + j for start in range(0, count, block) for j in range(each) for way in range(ways)
            ]
            within = None if block == count else block
            if list(order) == apart:
                return Deinterleave(dim, ways, source, within)
            if list(order) == together:
                return Interleave(dim, ways, source, within)
    return None


def _stream(order: Order, size: int, dim: int, source: Source) -> Source | None:
    """One of the streams that alternate over all of the tensor: rows 1, 3, 5, ..."""
    step = order[1] - order[0] if len(order) > 1 else 0
    if step < 2 or size != step * len(order) or list(order) != list(range(order[0], size, step)):
        return None
    return Part(dim, order[0] * len(order), (order[0] + 1) * len(order), Deinterleave(dim, step, source))


def _grouped(order: Order, size: int, dim: int, source: Source) -> Source | None:
    """The same rows of each of several equal groups: a run of each, or, for as many groups as possible, any order."""
    found: list[tuple[int, list[int]]] = []
    for groups in _divisors(len(order))[1:]:
        width, each = len(order) // groups, size // groups
        inner = list(order[:width])
        if size % groups or max(inner) >= each:
            continue
        if all(row == i // width * each + inner[i % width] for i, row in enumerate(order)):
            if inner == list(range(inner[0], inner[0] + width)):
                return Part(dim, inner[0], inner[0] + width, source, groups)
            found.append((groups, inner))
    for groups, inner in reversed(found):
        within = rows_source(inner, size // groups, dim + 1, Unflatten(dim, groups, source))
        if within is not None:
            return Flatten(dim, within)
    return None


def _several(order: Order, size: int, dim: int, source: Source) -> Source | None:
    """A few orders one after the other, each as long as possible; a long list is cut only where the rows jump."""
    cuts = [i for i in range(1, len(order)) if len(order) <= SEARCHED or order[i] != order[i - 1] + 1]
    parts: list[Source] = []
    start = 0
    while start < len(order):
        for end in [len(order), *(cut for cut in reversed(cuts) if cut > start)]:
            if (start, end) == (0, len(order)):
                continue
            found = _one(order[start:end], size, dim, source)
            if found is not None:
                parts.append(found)
                start = end
                break
        else:
            return None
        if len(parts) > LONGEST:
            return None
    return Concat(dim, tuple(parts))


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def shapes_like(source: Source, shape: tuple[int, ...], target: tuple[int, ...]) -> Iterator[Source]:
    """`source` of this shape in as many dimensions as `target`, every way that could fit it."""
    here, there = len(shape), len(target)
    found: list[Source] = []
    if here == there:
        found.append(source)
    elif here > there and shape.count(1) >= here - there:
        ones = tuple(dim for dim, size in enumerate(shape) if size == 1)[: here - there]
        found.append(Squeeze(ones, source))
    elif here < there and target.count(1) >= there - here:
        found.append(Unsqueeze(tuple(dim for dim, size in enumerate(target) if size == 1)[: there - here], source))
    if here == there - 1:
        flipped = (*shape[:-2], *shape[:-3:-1])
        for made, sizes in ((source, shape), (Transpose(source), flipped))[: min(here, 2)]:
            found += [Unflatten(dim, target[dim], made) for dim in range(here) if sizes[dim] % target[dim] == 0]
    if here == there + 1:
        found += [Flatten(dim, source) for dim in range(there)]
        found += [Flatten(dim, Transpose(source)) for dim in range(there)]
    yield from found
    if there >= 2:
        yield from (Transpose(made) for made in found)
