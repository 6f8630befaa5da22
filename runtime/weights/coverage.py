"""Every value of every stored tensor belongs to exactly one place: nothing is read twice, nothing is left out but what
an `Excerpt` says is carried."""

from collections.abc import Mapping

import numpy as np
import torch

from dayzero.runtime.weights.node import EXCERPT, Region, Shape, Shapes, as_range, whole
from dayzero.runtime.weights.rule import BoundRule


def check_coverage(bound: Mapping[str, BoundRule], shapes: Shapes) -> None:
    """Raises ValueError, naming tensor and parameters, where parts of one tensor overlap or leave some of it out.

    Only tensors that a `Part` or a `Trim` takes something of can have either; all other nodes use all of their tensors,
    and `bind` sees to it that no other rule does. Costs as many bytes as such a tensor is long.
    """
    taken: dict[str, list[tuple[str, Region]]] = {}
    sizes: dict[str, Shape] = {}
    carried: set[str] = set()
    for parameter, rule in bound.items():
        partial = [(leaf, inner, part) for leaf, inner, part in rule.source.leaves(rule.index) if part]
        if not partial:
            continue
        for leaf, inner, part in partial:
            name = next(leaf.names(inner))
            if part == EXCERPT:
                carried.add(name)
            sizes[name] = leaf.shape(shapes, inner)
            taken.setdefault(name, [])
        value = torch.empty(rule.shape(shapes), device="meta")
        for piece in rule.pieces(value, shapes):
            name = next(piece.leaf.names(piece.index))
            if name in taken:
                taken[name].append((parameter, piece.region))
    for name, regions in taken.items():
        _check(name, sizes[name], regions, carried=name in carried)


def _check(name: str, shape: Shape, regions: list[tuple[str, Region]], carried: bool) -> None:
    """Counts how often each value is taken, over the dimensions in which not every region is whole. carried: whether
    some may be taken never."""
    dims = [dim for dim in range(len(shape)) if any(part[dim] != whole(shape)[dim] for _, part in regions)] or [0]
    count = np.zeros([shape[dim] for dim in dims], dtype=np.uint8)
    for parameter, region in regions:
        at = count[tuple(region[dim] for dim in dims)]
        if at.any():
            others = sorted({other for other, part in regions if other != parameter and _meet(region, part)})
            raise ValueError(f"the same part of {name} is read for {' and '.join([parameter, *others])}")
        at += 1
    left = int((count == 0).sum())
    if left and not carried:
        first = [int(places[0]) for places in np.nonzero(count == 0)]
        where = ", ".join(f"{number} of dimension {dim}" for dim, number in zip(dims, first, strict=True))
        raise ValueError(f"{left} of {count.size} rows of {name} {list(shape)} are read for nothing, from {where} on")


def _meet(one: Region, other: Region) -> bool:
    return all(set(as_range(a)) & set(as_range(b)) for a, b in zip(one, other, strict=True))
