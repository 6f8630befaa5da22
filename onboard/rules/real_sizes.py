"""Expressions that hold for the shrunk model, at the sizes of the real one.

Sizes that a real parameter's shape shows are taken from there: experts in a stack, the length of a part, what a padded
tensor holds. The others (heads, the rows of one) are sizes of the config, or come from a few of them; in the shrunk
config all sizes differ, so the number tells which.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from itertools import combinations, permutations
from typing import Any

from dayzero.onboard.config_fields import IRRELEVANT
from dayzero.onboard.rules.cuts import runs_of
from dayzero.onboard.rules.expressions import NoRule
from dayzero.runtime.weights import (
    Concat,
    Deinterleave,
    Excerpt,
    Flatten,
    Interleave,
    Part,
    Source,
    Squeeze,
    Stack,
    Transpose,
    Trim,
    Unflatten,
    Unsqueeze,
)

Shape = tuple[int | None, ...]  # None: not known from the parameter
Place = Callable[[Part, int, int], tuple[int, int]]  # (shrunk part, real length, real groups) -> real (start, stop)
MOST_FACTOR = 16  # above this a number is no fraction of a size but a base, a limit, a scale
PAIR = 2  # streams that alternate in pairs are pairs at any size


class Sizes(dict[int, int]):
    """Shrunk size -> real size, of the config's fields. factors: its fractions, of which some sizes are taken
    (how much of a head turns, how much wider an inner part is). ambiguous: numbers that stand for several sizes."""

    factors: tuple[float, ...] = ()
    ambiguous: frozenset[int] = frozenset()


def sizes_between(small: Mapping[str, Any], full: Mapping[str, Any]) -> Sizes:
    """Shrunk size -> real size, from two configs of one model; a number that stands for two sizes is left out. Token
    ids and other fields that are no sizes do not count."""
    found: dict[int, set[int]] = defaultdict(set)
    factors: set[float] = set()

    def walk(one: Any, other: Any) -> None:
        if isinstance(one, Mapping) and isinstance(other, Mapping):
            for key in (one.keys() & other.keys()) - IRRELEVANT.keys():
                walk(one[key], other[key])
        elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
            for pair in zip(one, other, strict=True):
                walk(*pair)
        elif type(one) is int and type(other) is int and one > 1:
            found[one].add(other)
        elif type(one) is float and one == other and 0 < one < MOST_FACTOR and one != 1:
            factors.add(one)

    walk(small, full)
    sizes = Sizes({one: min(others) for one, others in found.items() if len(others) == 1})
    sizes.factors = tuple(sorted(factors))
    sizes.ambiguous = frozenset(found.keys() - sizes.keys())
    return sizes


def resized_layer(
    sources: Mapping[str, Source], shapes: Mapping[str, tuple[int, ...]], sizes: Mapping[int, int]
) -> dict[str, Source]:
    """The expressions of one layer's parameters, whose real shapes these are, at real sizes.

    Parts of one tensor belong together: each begins where the one before it ends. So do tensors of which the rows go on
    in the next (`cuts.py`); they are cut as evenly as here. Raises NoRule for a size that is not known.
    """
    found: dict[str, Source] = {}
    for run in runs_of(sources):
        wanted = [shapes[name][run.dim] for name in run.parameters]
        found |= run.sources(run.evenly(sum(wanted)), wanted)
    rest = {name: source for name, source in sources.items() if name not in found}
    lengths: dict[tuple, dict[tuple[int, int], int]] = defaultdict(dict)

    def measure(part: Part, length: int, groups: int) -> tuple[int, int]:
        lengths[part.part, part.dim, part.groups][part.start, part.stop] = length
        return 0, length

    for name, source in rest.items():
        _resized(source, tuple(shapes[name]), sizes, measure)
    places: dict[tuple, tuple[int, int]] = {}
    for key, held in lengths.items():
        start = 0
        for bounds, length in sorted(held.items()):
            places[key, bounds] = (start, start + length)
            start += length

    def place(part: Part, length: int, groups: int) -> tuple[int, int]:
        return places[(part.part, part.dim, part.groups), (part.start, part.stop)]

    found |= {name: _resized(source, tuple(shapes[name]), sizes, place) for name, source in rest.items()}
    return {name: found[name] for name in sources}


def _resized(source: Source, shape: Shape, sizes: Mapping[int, int], place: Place) -> Source:
    def inner(part: Source, shape: Shape) -> Source:
        return _resized(part, shape, sizes, place)

    match source:
        case Stack(over, count, part):
            return Stack(over, shape[0] or _real(count, sizes), inner(part, shape[1:]))
        case Transpose(part):
            return Transpose(inner(part, (*shape[:-2], shape[-1], shape[-2])))
        case Concat(dim, parts):
            unknown = _with(shape, dim, None if len(parts) > 1 else shape[dim])
            return Concat(dim, tuple(inner(part, unknown) for part in parts))
        case Squeeze(dims, part):
            held = list(shape)
            for dim in sorted(dims):
                held.insert(dim, 1)
            return Squeeze(dims, inner(part, tuple(held)))
        case Unsqueeze(dims, part):
            return Unsqueeze(dims, inner(part, tuple(size for dim, size in enumerate(shape) if dim not in dims)))
        case Flatten(dim, part):
            return Flatten(dim, inner(part, (*shape[:dim], None, None, *shape[dim + 1 :])))
        case Unflatten(dim, count, part):
            blocks, each = shape[dim] or _real(count, sizes), shape[dim + 1]
            joined = (*shape[:dim], blocks * each if each is not None else None, *shape[dim + 2 :])
            return Unflatten(dim, blocks, inner(part, joined))
        case Trim(dim, size, part):
            return Trim(dim, shape[dim] or _real(size, sizes), inner(part, _with(shape, dim, None)))
        case Part(dim, start, stop, part, groups):
            real_groups = 1 if groups == 1 else _real(groups, sizes)
            known = shape[dim]
            if known is not None and known % real_groups:
                raise NoRule(f"{known} rows do not fall into {real_groups} groups")
            length = known // real_groups if known is not None else _length(stop - start, sizes)
            first, last = _block(source, length) if isinstance(source, Excerpt) else place(source, length, real_groups)
            return replace(
                source, start=first, stop=last, part=inner(part, _with(shape, dim, None)), groups=real_groups
            )
        case Interleave(dim, ways, part, block) | Deinterleave(dim, ways, part, block):
            return replace(
                source,
                ways=ways if ways == PAIR else _real(ways, sizes),
                block=None if block is None else _real(block, sizes),
                part=inner(part, shape),
            )
    return source.with_children(tuple(inner(child, shape) for child in source.children))


def _length(rows: int, sizes: Mapping[int, int]) -> int:
    """Of a part: one row is one at any size, since every size of the small config is more."""
    return 1 if rows == 1 else _real(rows, sizes)


def _block(excerpt: Excerpt, length: int) -> tuple[int, int]:
    """Where an excerpt stands, whose neighbours nothing measures: it is one of equal blocks. Raises NoRule."""
    number, rest = divmod(excerpt.start, excerpt.stop - excerpt.start)
    if rest:
        raise NoRule(f"rows {excerpt.start}:{excerpt.stop} are carried beside others of unknown number")
    return number * length, (number + 1) * length


def _with(shape: Shape, dim: int, size: int | None) -> Shape:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _real(size: int, sizes: Mapping[int, int]) -> int:
    """The real size for a shrunk one: a size of the config, or the simplest that follows from its sizes: twice or half
    of one, a fraction that the config states, a sum, a product, both. Raises NoRule where that leaves two answers."""
    if size in sizes:
        return sizes[size]
    if size in getattr(sizes, "ambiguous", ()):
        raise NoRule(f"{size} stands for more than one size of the config")
    for made in _COMBINATIONS:
        found = set(made(size, sizes))
        if len(found) == 1:
            return found.pop()
        if found:
            break
    raise NoRule(f"{size} is no size of the config, and does not follow from one")


def _twice(size: int, sizes: Mapping[int, int]) -> Iterator[int]:
    if size % 2 == 0 and size // 2 in sizes:
        yield 2 * sizes[size // 2]
    if 2 * size in sizes and sizes[2 * size] % 2 == 0:
        yield sizes[2 * size] // 2


def _fraction(size: int, sizes: Mapping[int, int]) -> Iterator[int]:
    for factor in getattr(sizes, "factors", ()):
        yield from (int(real * factor) for one, real in sizes.items() if int(one * factor) == size)


def _sum_or_product(size: int, sizes: Mapping[int, int]) -> Iterator[int]:
    for (one, real), (two, other) in combinations(sizes.items(), 2):
        if one + two == size:
            yield real + other
        if one * two == size:
            yield real * other


def _three(size: int, sizes: Mapping[int, int]) -> Iterator[int]:
    """Heads of two parts, keys and values side by side, two products."""
    for (one, real), (two, other) in permutations(sizes.items(), 2):
        if one * 2 + two == size:
            yield real * 2 + other
        if one > two and size == 2 * one * two:
            yield 2 * real * other
        rest = size - one * two
        if rest > 0 and rest in sizes and one > two:
            yield real * other + sizes[rest]
        if size % one == 0 and (size // one - two) in sizes and size // one - two > two:
            yield real * (other + sizes[size // one - two])


_COMBINATIONS = (_twice, _fraction, _sum_or_product, _three)
