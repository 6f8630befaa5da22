"""Finds the weight rules by values: where in the reference's own files does each parameter of our model stand?

The shrunk reference, its weights all different, is saved by transformers under the checkpoint's names; our shrunk model
holds the same weights under ours. Every parameter is then expressed by stored tensors (`expressions.py`), and the
expressions of all layers are folded into rules with `{layer}` and `{expert}`. Tensor names carry no meaning here; they
only have to be the ones that the real checkpoint has.
"""

import re
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from dayzero.onboard.rules.expressions import NoRule, StoredValues, express, stored_names, tied
from dayzero.onboard.rules.layer_numbers import at_layers, numbered
from dayzero.onboard.rules.listed import continued
from dayzero.onboard.rules.real_sizes import resized_layer
from dayzero.runtime.spec import RuleSpec, SourceSpec
from dayzero.runtime.weights import Excerpt, Part, Rule, Source, bind, check_coverage

__all__ = ["LeftOver", "NoRule", "find_rules", "full_rules", "layer_templates"]


class LeftOver(NoRule):
    """Stored tensors, by their sorted names, of which no parameter is made."""

    def __init__(self, names: list[str]):
        self.names = names
        super().__init__(f"no parameter is made of {', '.join(names[:3])}{' ...' if names[3:] else ''}")


def find_rules(
    parameters: Mapping[str, Tensor], stored: Mapping[str, Tensor], idle: Mapping[str, Tensor] | None = None
) -> dict[str, Source]:
    """Expression of every parameter of our (shrunk) model over the stored tensors. Raises NoRule, naming the parameter,
    or LeftOver.

    Every value of every stored tensor must be used, exactly once: one left over would be lost on the way. A tensor that
    is stored twice (a tied head) is read once and written to both places.

    idle: where stored tensors have values that the model has no use for, booleans of their shape: these are left over.
    """
    idle = idle or {}
    copies = _copies(stored)
    twins = {name for others in copies.values() for name in others}
    known = StoredValues({name: tensor for name, tensor in stored.items() if name not in twins})
    found: dict[str, Source] = {}
    for name, value in parameters.items():
        try:
            found[name] = _excerpts(tied(express(value.detach(), known), copies), idle)
        except NoRule as error:
            raise NoRule(f"{name}: {error}") from None
    _check_each_once(found, stored, idle)
    return found


def _excerpts(source: Source, idle: Mapping[str, Tensor]) -> Source:
    """The expression with an `Excerpt` for every part of a tensor whose other values are idle."""
    if type(source) is Part and set(stored_names(source)) & idle.keys():
        return Excerpt(source.dim, source.start, source.stop, source.part, source.groups)
    return source.with_children(tuple(_excerpts(child, idle) for child in source.children))


def _copies(stored: Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Name -> other names under which the same tensor is stored."""
    first: dict[tuple, list[str]] = defaultdict(list)
    for name, tensor in stored.items():
        if tensor.numel():
            key = (tuple(tensor.shape), tensor.dtype, float(tensor.flatten()[0]), float(tensor.flatten()[-1]))
            first[key].append(name)
    copies: dict[str, list[str]] = {}
    for names in first.values():
        while names:
            name, *others = names
            same = [other for other in others if torch.equal(stored[name], stored[other])]
            if same:
                copies[name] = same
            names = [other for other in others if other not in same]
    return copies


def _check_each_once(found: Mapping[str, Source], stored: Mapping[str, Tensor], idle: Mapping[str, Tensor]) -> None:
    seen: dict[str, int] = {}
    for source in found.values():
        for leaf, index, partial in source.leaves({}):
            for name in leaf.names(index):
                if name in seen and not (partial and seen[name]):
                    raise NoRule(f"{name} would be read for two parameters")
                seen[name] = partial
    if left := sorted(stored.keys() - seen.keys()):
        raise LeftOver(left)
    try:
        bound = bind([Rule(parameter, source) for parameter, source in found.items()])
        shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
        check_coverage(bound, shapes)
    except ValueError as error:
        raise NoRule(str(error)) from None
    left_over = {name: torch.ones_like(mask) for name, mask in idle.items()}
    for rule in bound.values():
        if left_over.keys() & set(rule.names()):
            for piece in rule.pieces(torch.empty(rule.shape(shapes), device="meta"), shapes):
                for name in left_over.keys() & set(piece.leaf.names(piece.index)):
                    left_over[name][piece.region] = False
    for name, left in left_over.items():
        if not torch.equal(left, idle[name]):
            raise NoRule(f"values of {name} that the model uses are not those that a parameter is made of")


_LAYER = re.compile(r"^layers\.(\d+)\.")


def layer_templates(found: Mapping[str, Source]) -> tuple[dict[str, Source], dict[int, dict[str, Source]]]:
    """Splits expressions into those outside the layers and, by shrunk layer, those inside, with `{layer}` in the names.

    Raises NoRule where no number in the stored name follows from the layer (`layer_numbers`).
    """
    outside: dict[str, Source] = {}
    inside: dict[int, dict[str, Source]] = defaultdict(dict)
    layer_of: dict[str, int] = {}
    parameter_of: dict[str, str] = {}
    for parameter, source in found.items():
        match = _LAYER.match(parameter)
        if match is None:
            outside[parameter] = source
            continue
        layer = int(match.group(1))
        inside[layer][parameter[match.end() :]] = source
        for name in stored_names(source):
            layer_of[name], parameter_of[name] = layer, parameter
    templates = numbered(layer_of, parameter_of)
    return outside, {
        layer: {name: source.renamed(templates.__getitem__) for name, source in sources.items()}
        for layer, sources in inside.items()
    }


def full_rules(
    templates: tuple[dict[str, Source], dict[int, dict[str, Source]]],
    shrunk_layer_of: list[int],
    shapes: Mapping[str, tuple[int, ...]],
    sizes: Mapping[int, int] | None = None,
) -> list[RuleSpec]:
    """Rules of the real model: shrunk_layer_of[i] is the shrunk layer whose rules layer i follows.

    shapes: of the real parameters, from which the number of experts in a stack and the lengths of parts are taken.
    sizes: shrunk size -> real size (`real_sizes.sizes_between`), from which those are taken that no shape shows: heads,
    groups, the rows of a head. Raises NoRule for one that neither has.
    """
    outside, inside = templates
    sizes = sizes or {}
    whole = resized_layer(outside, {name: shapes[name] for name in outside}, sizes)
    rules = [RuleSpec(parameter=name, source=SourceSpec.of(source)) for name, source in whole.items()]
    groups: dict[tuple[str, Source], list[int]] = defaultdict(list)
    names = [
        [name for source in inside[shrunk].values() for name in stored_names(source)] for shrunk in shrunk_layer_of
    ]
    counted = at_layers(names)
    there: dict[int, list[str]] = defaultdict(list)
    for name in shapes:
        if match := _LAYER.match(name):
            there[int(match.group(1))].append(name[match.end() :])
    for layer, shrunk in enumerate(shrunk_layer_of):
        # Of parts that layers share, the first of them has the parameters.
        has = {name: source for name, source in inside[shrunk].items() if f"layers.{layer}.{name}" in shapes}
        has |= continued(has, [name for name in there[layer] if name not in has])
        theirs = {name: shapes[f"layers.{layer}.{name}"] for name in has}
        for name, source in resized_layer(has, theirs, sizes).items():
            own = source.renamed(lambda name, layer=layer: counted.get((name, layer), name))
            groups[name, own].append(layer)
    for (name, source), layers in groups.items():
        for bounds in progressions(layers):
            spec = SourceSpec.of(source)
            rules.append(RuleSpec(parameter=f"layers.{{layer}}.{name}", source=spec, ranges={"layer": bounds}))
    return rules


def progressions(numbers: list[int]) -> list[tuple[int, int] | tuple[int, int, int]]:
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
