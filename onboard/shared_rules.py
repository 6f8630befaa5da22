"""Weight rules of parts that several layers share (`sharing.py`): their tensors have the name of the first such layer.

While names are found they count as that layer's own, so that the layers of another model are found as usual; the rules
are then said of the shared part, and a checkpoint that repeats its tensors under the other layers' names gets them back
there.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from dayzero.onboard.expressions import NoRule, stored_names
from dayzero.onboard.sharing import SharedParts, first_name, shared_name
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
