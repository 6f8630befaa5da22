"""Weight rules of parts that several layers share (`sharing.py`): their tensors have the name of the first
such layer.

While names are found they count as that layer's own, so that the layers of another model are found as usual; the rules
are then said of the shared part, and a checkpoint that repeats its tensors under the other layers' names gets them back
there.
"""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dayzero.onboard.prove.proven import Proven
from dayzero.onboard.rules.expressions import NUMBER, NoRule, stored_names
from dayzero.onboard.rules.real_sizes import resized_layer
from dayzero.onboard.sharing import SharedParts, first_name, shared_name
from dayzero.onboard.structure.uses import list_around, members
from dayzero.runtime.spec import RuleSpec, SourceSpec
from dayzero.runtime.weights import Source, Stored, Tie


def as_own(found: Mapping[str, Source], sets: Sequence[SharedParts]) -> dict[str, Source]:
    """The expressions with shared parameters as those of the first layer, each tensor under one name."""
    return {
        first_name(name, sets): _once(source) if name.startswith("shared.") else source
        for name, source in found.items()
    }


def own_shapes(shapes: Mapping[str, Any], sets: Sequence[SharedParts]) -> dict[str, Any]:
    """The same of what is known of parameters by name."""
    return {first_name(name, sets): shape for name, shape in shapes.items()}


def as_shared(rules: Sequence[RuleSpec], sets: Sequence[SharedParts]) -> list[RuleSpec]:
    """The rules of a model with these shared parts, said of the shared parts again."""
    made: list[RuleSpec] = []
    parts = {name for held in sets for name in held.parts}
    for rule in rules:
        layered, _, rest = rule.parameter.partition("{layer}.")
        if layered != "layers." or rest.split(".")[0] not in parts:
            made.append(rule)
            continue
        for layer in range(*rule.ranges["layer"]):
            parameter = rule.parameter.format(layer=layer)
            name = shared_name(parameter, sets)
            source = rule.build().source
            own = _at(source, layer)
            if name != parameter:
                layers = next(held.layers for held in sets if layer in held.layers)
                others = [_at(source, other) for other in layers if other != layer]
                own = _tied(own, others)
            made.append(RuleSpec(parameter=name, source=SourceSpec.of(own)))
    return made


def _once(source: Source) -> Source:
    if isinstance(source, Tie):
        return source.parts[0]
    return source.with_children(tuple(_once(child) for child in source.children))


def _at(source: Source, layer: int) -> Source:
    return source.renamed(lambda name: name.replace("{layer}", str(layer)))


def _tied(source: Source, others: Sequence[Source]) -> Source:
    """The expression with every tensor also under the names that it has in `others`."""
    if isinstance(source, Stored):
        names = dict.fromkeys(name for other in others for name in stored_names(other))
        return Tie((source, *(Stored(name) for name in names if name != source.name)))
    children = [[other.children[place] for other in others] for place in range(len(source.children))]
    if not source.children:
        raise NoRule(f"{stored_names(source)[0]} is shared by layers, but is no plain tensor")
    return source.with_children(
        tuple(_tied(child, theirs) for child, theirs in zip(source.children, children, strict=True))
    )


_USE = re.compile(r"^layers\.(\d+)\.(\w+)\.uses\.(\d+)\.(.+)$")


def of_uses(found: Mapping[str, Source]) -> dict[str, Source]:
    """Those of `as_own` that belong to one use of a part (`runtime.nn.adapted`): their tensors stand in lists that
    count the uses, so that a number in the name is neither the layer's nor the same in another model."""
    return {name: source for name, source in found.items() if _USE.match(name)}


def rules_of_uses(
    found: Mapping[str, Source],
    shapes: Mapping[str, tuple[int, ...]],
    proven: Proven,
    models: tuple[nn.Module, nn.Module],
    follows: Sequence[int],
    sizes: Mapping[int, int],
) -> list[RuleSpec]:
    """Rules for the parameters of each use in another model. found: `of_uses` of the shrunk model; shapes: `own_shapes`
    of the other one; models: the shrunk reference and the other; follows: layer of the other -> shrunk layer.

    Raises NoRule for a use that nothing in the shrunk model is like.
    """
    of_layer: dict[int, dict[str, Source]] = defaultdict(dict)
    for name in shapes:
        if (match := _USE.match(name)) is not None:
            layer, part, use, rest = int(match[1]), match[2], int(match[3]), match[4]
            of_layer[layer][name] = _of_use(found, proven, models, (follows[layer], layer), part, use, rest)
    made = []
    for layer, sources in of_layer.items():
        resized = resized_layer(sources, {name: shapes[name] for name in sources}, sizes)
        for name, source in resized.items():
            parameter = name.replace(f"layers.{layer}.", "layers.{layer}.", 1)
            spec = SourceSpec.of(source)
            made.append(RuleSpec(parameter=parameter, source=spec, ranges={"layer": (layer, layer + 1)}))
    return made


def _of_use(
    found: Mapping[str, Source],
    proven: Proven,
    models: tuple[nn.Module, nn.Module],
    layers: tuple[int, int],
    part: str,
    use: int,
    rest: str,
) -> Source:
    """What the parameter `rest` of one use of a part is made of, sizes as in the small model. layers: the small model's
    and the other's."""
    like, layer = layers
    prefix = f"layers.{like}.{part}.uses."
    known = [name for name in found if name.startswith(prefix) and name.endswith(f".{rest}")]
    if not known:
        raise NoRule(f"layers.{layer}.{part}: no use of {part} of the small model's layer {like} has {rest}")
    model = known[min(use, len(known) - 1)]
    claim = next(held for held in proven.layers[like].parts if held.unit.name == part)
    small, real = (
        held.get_submodule(f"{proven.parts.layers}.{number}.{claim.path}")
        for held, number in zip(models, layers, strict=True)
    )
    inner = stored_names(claim.attempt.candidate.parameters[model.removeprefix(f"layers.{like}.{part}.")])[0]
    around = list_around(small, inner.rpartition(".")[0])
    place = None
    if around is not None:
        place = int(inner.removeprefix(f"{around}.").partition(".")[0]), members(real, around)[use]
    return found[model].renamed(lambda name: _renumbered(name, like, place))


def _renumbered(name: str, layer: int, place: tuple[int, int] | None) -> str:
    """The name with the layer's number as a placeholder and, after it, the place in a list as it is elsewhere."""
    numbers = list(NUMBER.finditer(name))
    first = next((number for number, hit in enumerate(numbers) if int(hit.group()) == layer), None)
    if first is None:
        raise NoRule(f"{name} does not hold the layer's number {layer}")
    after = name[numbers[first].end() :]
    if place is not None:
        hit = next((hit for hit in NUMBER.finditer(after) if int(hit.group()) == place[0]), None)
        if hit is None:
            raise NoRule(f"{name} does not hold the place {place[0]} in its list")
        after = f"{after[: hit.start()]}{place[1]}{after[hit.end() :]}"
    return f"{name[: numbers[first].start()]}{{layer}}{after}"
