"""Parts that several layers of a model share: modules whose parameters are the same objects."""

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from dayzero.onboard.prove.proven import NotProven, Proven, ProvenLayer, Unproven


@dataclass(frozen=True)
class SharedParts:
    """layers: those that have the same parts, the first of which the reference names them by. parts: their names."""

    layers: tuple[int, ...]
    parts: tuple[str, ...]


def shared_parts(
    model: nn.Module, path: str, layers: Sequence[ProvenLayer], follows: Sequence[int]
) -> list[SharedParts]:
    """The sets of shared parts of the list at `path` of `model`, whose layer i is like layers[follows[i]].

    Raises NotProven where a part shares some of its parameters only, or a layer shares with several sets of layers.
    """
    users: dict[frozenset[int], list[tuple[int, str]]] = defaultdict(list)
    for index, like in enumerate(follows):
        for part in layers[like].parts:
            held = model.get_submodule(f"{path}.{index}.{part.path}".rstrip("."))
            parameters = frozenset(map(id, held.parameters()))
            if parameters and part.unit.is_module and not part.is_layer:
                users[parameters].append((index, part.unit.name))
    _check_whole(users, path)
    names: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for places in users.values():
        if len(places) > 1:
            names[tuple(index for index, _ in places)].append(places[0][1])
    found = [SharedParts(held, tuple(parts)) for held, parts in sorted(names.items())]
    counted = [index for held in found for index in held.layers]
    if len(set(counted)) < len(counted):
        raise NotProven([Unproven("structure", f"layers of {path} share parts with different sets of other layers")])
    return found


def shared_sets(model: nn.Module, proven: Proven, follows: Sequence[int]) -> list[SharedParts]:
    """The same of `model` as a whole, whose layer i is like the shrunk layer follows[i]."""
    return shared_parts(model, proven.parts.layers, proven.layers, follows)


def _check_whole(users: Mapping[frozenset[int], list[tuple[int, str]]], path: str) -> None:
    owner: dict[int, tuple[int, str]] = {}
    for parameters, places in users.items():
        index, name = places[0]
        if len({one for _, one in places}) > 1:
            raise NotProven([Unproven("structure", f"{name} of {path}.{index} is another part of another layer")])
        for parameter in parameters:
            if parameter in owner:
                other, of = owner[parameter]
                why = f"{name} of {path}.{index} shares some of its parameters with {of} of {path}.{other}, not all"
                raise NotProven([Unproven("structure", why)])
            owner[parameter] = index, name


def shared_name(name: str, sets: Sequence[SharedParts]) -> str:
    """The name in our model of what is `layers.I.PART...`: `shared.N.PART...` where the part is shared."""
    match = re.match(r"^layers\.(\d+)\.(\w+)", name)
    if match is not None:
        for number, held in enumerate(sets):
            if int(match[1]) in held.layers and match[2] in held.parts:
                return f"shared.{number}.{match[2]}{name[match.end() :]}"
    return name


def first_name(name: str, sets: Sequence[SharedParts]) -> str:
    """The inverse of `shared_name`, for the first of the layers that share."""
    match = re.match(r"^shared\.(\d+)\.", name)
    return name if match is None else f"layers.{sets[int(match[1])].layers[0]}.{name[match.end() :]}"
