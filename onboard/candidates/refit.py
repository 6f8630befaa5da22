"""A claim found on one model, for another model whose sizes differ: where a tensor is divided moves with the sizes."""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from dayzero.onboard.candidates.evidence import Candidate, Site
from dayzero.onboard.oracle.reference import state_of
from dayzero.runtime.weights import Part, Source

Shapes = Mapping[str, tuple[int, ...]]


def refitted(candidate: Candidate, wanted: Shapes, stored: Shapes) -> Candidate:
    """The claim with parts of tensors as long as the block's parameters are. wanted: their shapes; stored: those of
    the module's. The claim as it is where it fits already, and where parts lie otherwise than end to end."""
    if all(_fits(source, wanted.get(name), stored) for name, source in candidate.parameters.items()):
        return candidate
    divided = {name: _chain(source) for name, source in candidate.parameters.items()}
    divisions: dict[tuple, dict[int, tuple[int, int]]] = {}  # what is divided -> start -> (stop, length now)
    for name, chain in divided.items():
        part = next((node for node in chain if isinstance(node, Part)), None)
        if part is None or name not in wanted:
            continue
        length = _length(part, wanted[name], stored)
        if length is None:
            return candidate
        divisions.setdefault(_whole(part), {})[part.start] = (part.stop, length)
    moved: dict[tuple, dict[int, tuple[int, int]]] = {}
    for whole, pieces in divisions.items():
        before, now = 0, 0
        for start, (stop, length) in sorted(pieces.items()):
            if start != before:
                return candidate
            moved.setdefault(whole, {})[start] = (now, now + length)
            before, now = stop, now + length
    parameters = {name: _moved(source, moved) for name, source in candidate.parameters.items()}
    made = replace(candidate)
    made.parameters = parameters  # those of blocks inside included, which are made of the arguments otherwise
    return made


def refitted_to(candidate: Candidate, site: Site) -> Candidate:
    """`refitted` for the module at `site`; the claim as it is where it makes no block there."""
    try:
        with torch.device("meta"):
            block = candidate.build(site.module, site.config)
    except (ValueError, TypeError, AttributeError, IndexError):
        return candidate
    wanted = {name: tuple(held.shape) for name, held in (*block.named_parameters(), *block.named_buffers())}
    return refitted(candidate, wanted, {name: tuple(held.shape) for name, held in state_of(site.module).items()})


def _fits(source: Source, wanted: tuple[int, ...] | None, stored: Shapes) -> bool:
    try:
        return wanted is None or source.shape(stored, {}) == wanted
    except (ValueError, KeyError, IndexError):
        return False


def _chain(source: Source) -> list[Source]:
    """The nodes from the expression down to what is stored; [] for one that branches or divides twice."""
    found = [source]
    while children := found[-1].children:
        if len(children) != 1:
            return []
        found.append(children[0])
    return found if sum(isinstance(node, Part) for node in found) <= 1 else []


def _whole(part: Part) -> tuple:
    return part.part, part.dim, part.groups


def _length(part: Part, wanted: tuple[int, ...], stored: Shapes) -> int | None:
    """Rows of a group that the part must have, since all else in its chain keeps the number of elements."""
    try:
        shape: tuple[int, ...] = part.part.shape(stored, {})
    except (ValueError, KeyError, IndexError):
        return None
    rows, left = divmod(math.prod(wanted) * shape[part.dim], math.prod(shape) * part.groups)
    return None if left or not rows else rows


def _moved(source: Source, moved: Mapping[tuple, Mapping[int, tuple[int, int]]]) -> Source:
    if isinstance(source, Part) and source.start in (places := moved.get(_whole(source), {})):
        start, stop = places[source.start]
        return replace(source, start=start, stop=stop)
    return source.with_children(tuple(_moved(child, moved) for child in source.children))
