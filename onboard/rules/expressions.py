"""Finds by its values what a parameter is made of: which stored tensors, and which of their rows in which order.

The values are random, so a value tells the tensor that it is from; the few that occur twice tell nothing.
"""

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from dayzero.onboard.rules.rows import rows_source, shapes_like
from dayzero.runtime.safetensors_reader import TensorsReader
from dayzero.runtime.weights import BoundRule, Concat, Source, Stack, Stored, Tie, Transpose, Trim

NUMBER = re.compile(r"(?<=[._])[0-9]+(?=[._]|$)")  # a whole component of a dotted name, or after an underscore


AMBIGUOUS, NOWHERE = -1, -2


class NoRule(Exception):
    """A parameter that is not made of stored tensors in any way known here."""


class StoredValues:
    """Stored tensors, found by their values."""

    def __init__(self, stored: Mapping[str, Tensor]):
        self.tensors = {name: tensor for name, tensor in stored.items() if tensor.numel()}
        self.shapes = {name: tuple(tensor.shape) for name, tensor in self.tensors.items()}
        self._names = list(self.tensors)
        self._first: dict[float, list[str]] = defaultdict(list)
        for name, tensor in self.tensors.items():
            self._first[float(tensor.flatten()[0])].append(name)
        flat = [tensor.flatten().to(torch.float64) for tensor in self.tensors.values()]
        owner = [torch.full((len(values),), number) for number, values in enumerate(flat)]
        values, places = torch.cat([*flat, torch.empty(0, dtype=torch.float64)]).sort()
        self._values, which, count = values.unique_consecutive(return_inverse=True, return_counts=True)
        self._owner = torch.full((len(count),), AMBIGUOUS)
        self._owner[which] = torch.cat([*owner, torch.empty(0, dtype=torch.long)])[places]
        self._owner[count > 1] = AMBIGUOUS

    def starting(self, value: Tensor) -> list[str]:
        """Tensors whose first value is that of `value`."""
        return self._first.get(float(value.flatten()[0]), [])

    def owners(self, value: Tensor) -> Tensor:
        """The number of the tensor that each value is from, `AMBIGUOUS` or `NOWHERE`."""
        wanted = value.to(torch.float64).contiguous()
        if not len(self._values):
            return torch.full(value.shape, NOWHERE)
        place = torch.searchsorted(self._values, wanted).clamp(max=len(self._values) - 1)
        return torch.where(self._values[place] == wanted, self._owner[place], NOWHERE)

    def name(self, number: int) -> str:
        return self._names[number]


def express(value: Tensor, stored: StoredValues) -> Source:
    """The expression over stored tensors that gives exactly `value`, the plainest that fits. Raises NoRule."""
    for name in stored.starting(value):
        tensor = stored.tensors[name]
        if tensor.shape == value.shape and torch.equal(tensor, value):
            return Stored(name)
        if value.ndim >= 2 and tensor.shape == value.mT.shape and torch.equal(tensor.mT, value):
            return Transpose(Stored(name))
    owners = stored.owners(value)
    if value.numel() and value.ndim and int(owners.min()) > NOWHERE:
        known = owners[owners > AMBIGUOUS].unique().tolist()
        if len(known) == 1:
            found = _from_one(value, stored.name(known[0]), stored)
            if found is not None:
                return found
        for dim in range(value.ndim):
            parts = _side_by_side(value, dim, owners, stored)
            if parts:
                return Concat(dim, tuple(parts))
        if value.ndim >= 2:
            rows = [express(row, stored) for row in value]
            return Stack("expert", len(rows), fold(rows, "expert"))
    raise NoRule(f"no stored tensor holds these {list(value.shape)} values")


def _side_by_side(value: Tensor, dim: int, owners: Tensor, stored: StoredValues) -> list[Source]:
    """Expressions that fill `value` one after the other along `dim`, each of one tensor, [] if there are none."""
    flat = owners.movedim(dim, 0).reshape(owners.shape[dim], -1)
    most = flat.amax(1)
    if bool(((flat != most[:, None]) & (flat > AMBIGUOUS)).any()) or int(most.min()) == AMBIGUOUS:
        return []
    line = most.tolist()
    cuts = [0, *(i for i in range(1, len(line)) if line[i] != line[i - 1]), len(line)]
    if len(cuts) < 3:
        return []
    parts: list[Source] = []
    for start, end in itertools.pairwise(cuts):
        name = stored.name(line[start])
        if len(stored.shapes[name]) < value.ndim and all(b - a == 1 for a, b in itertools.pairwise(cuts)):
            return []  # one tensor a row is a stack
        found = _from_one(value.narrow(dim, start, end - start), name, stored)
        if found is None:
            return []
        parts.append(found)
    return parts


def _from_one(value: Tensor, name: str, stored: StoredValues) -> Source | None:
    """The expression over one stored tensor that gives `value`: another shape, and other rows along one dimension."""
    tensors = TensorsReader({name: stored.tensors[name]})
    for source in shapes_like(Stored(name), stored.shapes[name], tuple(value.shape)):
        view = BoundRule("", source, {}).read(tensors, stored.shapes)
        others = [dim for dim in range(value.ndim) if view.shape[dim] != value.shape[dim]]
        if not others and torch.equal(view, value):
            return source
        for dim in others[:1] if others else range(value.ndim):
            order = _order(value, view, dim) if len(others) < 2 else None
            if order is None:
                continue
            if (
                order == list(range(len(order)))
                and not view.narrow(dim, len(order), len(view.movedim(dim, 0)) - len(order)).any()
            ):
                return Trim(dim, len(order), source)
            found = rows_source(order, view.shape[dim], dim, source)
            if found is not None:
                return found
    return None


def _order(value: Tensor, view: Tensor, dim: int) -> list[int] | None:
    """Numbers along `dim` of `view` with which it gives `value`, None if there are none."""
    ours, theirs = _rows(value, dim), _rows(view, dim)
    place = {row: number for number, row in reversed(list(enumerate(theirs)))}
    order = [place.get(row, -1) for row in ours]
    return order if min(order) >= 0 and len(set(order)) == len(order) else None


def _rows(tensor: Tensor, dim: int) -> list[bytes]:
    """The bytes of every slice along `dim`."""
    return [row.tobytes() for row in tensor.to(torch.float64).movedim(dim, 0).contiguous().numpy()]


def fold(sources: list[Source], over: str) -> Source:
    """One expression with `{over}` in place of 0, 1, 2, ... for a list that differs in just that. Raises NoRule."""
    folded = _replace_number(sources[0], sources[1] if len(sources) > 1 else None, over)
    for number, source in enumerate(sources):
        if folded.renamed(lambda name, n=number: name.replace("{" + over + "}", str(n))) != source:
            raise NoRule(f"{source} does not continue the series {folded}")
    return folded


def stored_names(source: Source) -> list[str]:
    """Every name below an expression, placeholders and all."""
    names: list[str] = []
    source.renamed(lambda name: names.append(name) or name)
    return names


def _replace_number(first: Source, second: Source | None, over: str) -> Source:
    """The number that changes from the first to the second expression becomes `{over}`; all of it if there is one."""
    others = iter(stored_names(second) if second is not None else [])

    def change(name: str) -> str:
        other = next(others, None)
        numbers = list(NUMBER.finditer(name))
        theirs = list(NUMBER.finditer(other)) if other is not None else []
        for position, match in enumerate(numbers):
            changed = position < len(theirs) and theirs[position].group() != match.group()
            if changed or (other is None and position == len(numbers) - 1):
                return name[: match.start()] + "{" + over + "}" + name[match.end() :]
        return name

    return first.renamed(change)


def tied(found: Source, copies: Mapping[str, list[str]]) -> Source:
    """The expression with every tensor that `copies` has more names for written under all of them."""
    if isinstance(found, Stored):
        others = copies.get(found.name, [])
        return Tie((found, *map(Stored, others))) if others else found
    return found.with_children(tuple(tied(child, copies) for child in found.children))
