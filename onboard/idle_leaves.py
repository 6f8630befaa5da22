"""What a layer leaves for later layers is left only where one of them takes it: a reference may keep it for others,
such as a model that drafts."""

from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from dayzero.onboard.candidates import Candidate, Evidence
from dayzero.onboard.prove.proven import ProvenLayer
from dayzero.runtime.spec import LayerKind, PartSpec


def taken_by(layers: Iterable[ProvenLayer], config: Any) -> set[str]:
    """The names under which these layers take what earlier ones left."""
    found: set[str] = set()

    def look(candidate: Candidate) -> None:
        for name, argument in candidate.arguments.items():
            if isinstance(argument, Candidate):
                look(argument)
            elif name == "takes" and isinstance(argument, Evidence):
                found.add(argument.resolve(nn.Module(), config))

    for layer in layers:
        for part in layer.all_parts:
            look(part.attempt.candidate)
    return found


def without_idle_leaves(kind: LayerKind, taken: Collection[str]) -> LayerKind:
    """The kind of layer, leaving nothing under a name that no layer takes."""
    return kind.model_copy(update={"parts": [_without(part, taken) for part in kind.parts]})


def _without(part: PartSpec, taken: Collection[str]) -> PartSpec:
    if part.block.arguments.get("leaves") in {None, *taken}:
        return part
    arguments = {name: value for name, value in part.block.arguments.items() if name != "leaves"}
    return part.model_copy(update={"block": part.block.model_copy(update={"arguments": arguments})})
