"""Finds the weight rules by values: where in the reference's own files does each parameter of our model stand?

The shrunk reference, its weights all different, is saved by transformers under the checkpoint's names; our shrunk model
holds the same weights under ours. Every parameter is then expressed as stored tensors, transposed, put side by side or
stacked, and the expressions of all layers are folded into rules with `{layer}` and `{expert}`. Tensor names carry no
meaning here; they only have to be the ones that the real checkpoint has.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from dayzero.runtime.spec import RuleSpec, SourceSpec
from dayzero.runtime.weights import Concat, Source, Stack, Stored, Transpose


class NoRule(Exception):
    """A parameter that is not made of stored tensors in any way known here."""


class _Index:
    """Stored tensors by their first value, which is enough to find the few that could match."""

    def __init__(self, stored: Mapping[str, Tensor]):
        self.by_first: dict[float, list[tuple[str, Tensor]]] = defaultdict(list)
        for name, tensor in stored.items():
            if tensor.numel():
                self.by_first[float(tensor.flatten()[0])].append((name, tensor))

    def starting(self, value: Tensor) -> list[tuple[str, Tensor]]:
        return self.by_first.get(float(value.flatten()[0]), [])


def express(value: Tensor, index: _Index) -> Source:
    """The expression over stored tensors that gives exactly `value`. Raises NoRule."""
    for name, tensor in index.starting(value):
        if tensor.shape == value.shape and torch.equal(tensor, value):
            return Stored(name)
        if value.ndim >= 2 and tensor.shape == value.mT.shape and torch.equal(tensor.mT, value):
            return Transpose(Stored(name))
    for dim in range(value.ndim):
        parts = _side_by_side(value, dim, index)
        if parts:
            return Concat(dim, tuple(parts))
    if value.ndim >= 2:
        rows = [express(row, index) for row in value]
        return Stack("expert", len(rows), _fold(rows, "expert"))
    raise NoRule(f"no stored tensor holds these {list(value.shape)} values")


def _side_by_side(value: Tensor, dim: int, index: _Index) -> list[Source]:
    """Stored tensors that fill `value` one after the other along `dim`, [] if they do not."""
    parts: list[Source] = []
    start = 0
    while start < value.shape[dim]:
        rest = value.narrow(dim, start, value.shape[dim] - start)
        for name, tensor in index.starting(rest):
            for candidate, source in ((tensor, Stored(name)), (tensor.mT if tensor.ndim >= 2 else tensor, None)):
                fits = candidate.ndim == value.ndim and candidate.shape[dim] <= rest.shape[dim]
                if fits and _equal_part(rest, candidate, dim):
                    parts.append(source or Transpose(Stored(name)))
                    start += candidate.shape[dim]
                    break
            else:
                continue
            break
        else:
            return []
    return parts if len(parts) > 1 else []


def _equal_part(rest: Tensor, candidate: Tensor, dim: int) -> bool:
    part = rest.narrow(dim, 0, candidate.shape[dim])
    return part.shape == candidate.shape and torch.equal(part, candidate)


def _fold(sources: list[Source], over: str) -> Source:
    """One expression with `{over}` in place of 0, 1, 2, ... for a list that differs in just that. Raises NoRule."""
    folded = _replace_number(sources[0], sources[1] if len(sources) > 1 else None, over)
    for number, source in enumerate(sources):
        if _filled(folded, over, number) != source:
            raise NoRule(f"{source} does not continue the series {folded}")
    return folded


def map_names(source: Source, change: Callable[[str], str]) -> Source:
    """The same expression over other names."""
    match source:
        case Stored(name):
            return Stored(change(name))
        case Transpose(part):
            return Transpose(map_names(part, change))
        case Stack(over, count, part):
            return Stack(over, count, map_names(part, change))
        case Concat(dim, parts):
            return Concat(dim, tuple(map_names(part, change) for part in parts))
    raise TypeError(source)


def _stored_names(source: Source) -> list[str]:
    names: list[str] = []
    map_names(source, lambda name: names.append(name) or name)
    return names


def _filled(source: Source, over: str, number: int) -> Source:
    return map_names(source, lambda name: name.replace("{" + over + "}", str(number)))


_NUMBER = re.compile(r"(?<=[._])[0-9]+(?=[._]|$)")  # a whole component of a dotted name, or after an underscore


def _replace_number(first: Source, second: Source | None, over: str) -> Source:
    """The number that changes from the first to the second expression becomes `{over}`; all of it if there is one."""
    others = iter(_stored_names(second) if second is not None else [])

    def change(name: str) -> str:
        other = next(others, None)
        numbers = list(_NUMBER.finditer(name))
        theirs = list(_NUMBER.finditer(other)) if other is not None else []
        for position, match in enumerate(numbers):
            changed = position < len(theirs) and theirs[position].group() != match.group()
            if changed or (other is None and position == len(numbers) - 1):
                return name[: match.start()] + "{" + over + "}" + name[match.end() :]
        return name

    return map_names(first, change)


def find_rules(parameters: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> dict[str, Source]:
    """Expression of every parameter of our (shrunk) model over the stored tensors. Raises NoRule, naming the parameter.

    Every stored tensor must be used, exactly once: one left over would be lost on the way.
    """
    index = _Index(stored)
    found: dict[str, Source] = {}
    for name, value in parameters.items():
        try:
            found[name] = express(value.detach(), index)
        except NoRule as error:
            raise NoRule(f"{name}: {error}") from None
    used = [name for source in found.values() for name in _expand(source)]
    if len(used) != len(set(used)):
        twice = sorted({name for name in used if used.count(name) > 1})
        raise NoRule(f"{twice[0]} would be read for two parameters")
    if left := sorted(stored.keys() - set(used)):
        raise NoRule(f"no parameter is made of {', '.join(left[:3])}{' ...' if len(left) > 3 else ''}")
    return found


def _expand(source: Source) -> list[str]:
    return list(source.names({}))


_LAYER = re.compile(r"^layers\.(\d+)\.")


def layer_templates(found: Mapping[str, Source]) -> tuple[dict[str, Source], dict[int, dict[str, Source]]]:
    """Splits expressions into those outside the layers and, by shrunk layer, those inside, with `{layer}` in the names.

    Raises NoRule where the stored name does not hold the layer's number.
    """
    outside: dict[str, Source] = {}
    inside: dict[int, dict[str, Source]] = defaultdict(dict)
    for parameter, source in found.items():
        match = _LAYER.match(parameter)
        if match is None:
            outside[parameter] = source
            continue
        layer = int(match.group(1))

        def numbered(name: str, layer=layer, parameter=parameter) -> str:
            hits = [hit for hit in _NUMBER.finditer(name) if int(hit.group()) == layer]
            if not hits:
                raise NoRule(f"{parameter} is made of {name}, which does not hold the layer's number {layer}")
            return name[: hits[0].start()] + "{layer}" + name[hits[0].end() :]

        inside[layer][parameter[match.end() :]] = map_names(source, numbered)
    return outside, dict(inside)


def full_rules(
    templates: tuple[dict[str, Source], dict[int, dict[str, Source]]],
    shrunk_layer_of: list[int],
    shapes: Mapping[str, tuple[int, ...]],
) -> list[RuleSpec]:
    """Rules of the real model: shrunk_layer_of[i] is the shrunk layer whose rules layer i follows; shapes are the real
    parameters', from which the number of experts in a stack is taken."""
    outside, inside = templates
    rules = [RuleSpec(parameter=name, source=SourceSpec.of(_resize(s, shapes[name]))) for name, s in outside.items()]
    groups: dict[tuple[str, Any], list[int]] = defaultdict(list)
    for layer, shrunk in enumerate(shrunk_layer_of):
        for name, source in inside[shrunk].items():
            groups[name, _resize(source, shapes[f"layers.{layer}.{name}"])].append(layer)
    for (name, source), layers in groups.items():
        for bounds in _progressions(layers):
            spec = SourceSpec.of(source)
            rules.append(RuleSpec(parameter=f"layers.{{layer}}.{name}", source=spec, ranges={"layer": bounds}))
    return rules


def _resize(source: Source, shape: tuple[int, ...]) -> Source:
    match source:
        case Stack(over, _, part):
            return Stack(over, shape[0], part)
        case Transpose(part):
            return Transpose(_resize(part, (*shape[:-2], shape[-1], shape[-2])))
        case Concat(dim, parts):
            # Sizes along `dim` are not known per part; stacks inside a concatenation share the other dimensions.
            return Concat(dim, tuple(_resize(part, shape) for part in parts)) if dim else source
    return source


def _progressions(numbers: list[int]) -> list[tuple[int, int] | tuple[int, int, int]]:
    """The numbers as few ranges: consecutive runs, or one arithmetic progression where they are one."""
    step = numbers[1] - numbers[0] if len(numbers) > 2 else 1
    if step > 1 and numbers == list(range(numbers[0], numbers[-1] + 1, step)):
        return [(numbers[0], numbers[-1] + 1, step)]
    runs: list[tuple[int, int] | tuple[int, int, int]] = []
    start = numbers[0]
    for previous, number in zip(numbers, [*numbers[1:], None], strict=True):
        if number != previous + 1:
            runs.append((start, previous + 1))
            start = number if number is not None else start
    return runs
