"""A config in one spelling: what its class declares, concrete, with nothing twice.

A config.json may state a size under an older name, leave it to a default, or give a pattern from which the class makes
a list with one entry a layer. To shrink a config each size must stand in one place, and the lists must be there.
"""

import copy
from collections.abc import Mapping
from typing import Any

from dayzero.onboard.oracle.reference import load_config
from dayzero.runtime.errors import InputError

# What the library adds to every config it writes down.
_NOISE = {"_name_or_path", "output_attentions", "transformers_version", "_attn_implementation"}


def canonical(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the defaults of its class filled in and without fields that the class computes from others.

    Loading it gives what loading `config` gives; where leaving computed fields out would change that, they are kept.
    Raises UnknownArchitecture and InputError as load_config does.
    """
    loaded = load_config(config)
    whole = loaded.to_dict()
    made = _stated(loaded, whole, config)
    for _ in range(2):
        differing = _differences(whole, load_config(made).to_dict())
        if not differing:
            break
        for path in differing:
            _copy(whole, made, path)
    made["architectures"] = list(config.get("architectures") or [])
    return made


def _stated(loaded: Any, whole: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Declared fields and given ones: given values where they are plain, the loaded ones otherwise."""
    declared = {name for cls in type(loaded).__mro__ for name in getattr(cls, "__annotations__", {})}
    aliases = getattr(type(loaded), "attribute_map", None) or {}
    known = declared | given.keys() | {aliases[name] for name in (declared | given.keys()) & aliases.keys()}
    made: dict[str, Any] = {}
    for name, value in whole.items():
        if name in _NOISE or (name not in known and name != "model_type"):
            continue
        # Only a nested config is asked for: an attribute that differs between layers may not be read on the whole.
        part = getattr(loaded, name, None) if isinstance(value, Mapping) else None
        if hasattr(part, "to_dict"):
            nested = given.get(name)
            made[name] = _stated(part, dict(value), nested if isinstance(nested, Mapping) else {})
        else:
            stated = given.get(name)
            made[name] = stated if type(stated) is int and type(value) is int else value
    return made


def _differences(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Paths of fields of `one` that `other` lacks or has otherwise."""
    found: list[tuple[str, ...]] = []
    for name, value in one.items():
        if name in _NOISE or name == "architectures":
            continue
        if isinstance(value, Mapping) and isinstance(other.get(name), Mapping):
            found += [(name, *path) for path in _differences(value, other[name])]
        elif name not in other or value != other[name]:
            found.append((name,))
    return found


def _copy(source: Mapping[str, Any], target: dict[str, Any], path: tuple[str, ...]) -> None:
    for name in path[:-1]:
        source, target = source[name], target.setdefault(name, {})
    target[path[-1]] = source[path[-1]]


def set_by(config: Mapping[str, Any], name: str) -> list[str]:
    """Other fields that the class computes from this one when a config is loaded: those that change when it does.

    A pattern that becomes a list with one entry a layer, or an older name of another field, is read by no module of the
    model; what it sets is. `name` is dotted for a field of a nested part. A value that the class then refuses was read
    too, and counts as setting the field itself.
    """
    part, last = _part(config, name)
    if last not in part:
        return []
    before = load_config(config).to_dict()
    for other in (*_others(part[last]), _ABSENT):
        changed = copy.deepcopy(dict(config))
        inner, _ = _part(changed, name)
        if other is _ABSENT:
            del inner[last]
        else:
            inner[last] = other
        try:
            after = load_config(changed).to_dict()
        except (InputError, ValueError, TypeError, AttributeError, KeyError, IndexError):
            if other is _ABSENT:
                continue
            return [name]
        differing = {".".join(path) for path in [*_differences(before, after), *_differences(after, before)]} - {name}
        if differing:
            return sorted(differing)
    return []


_ABSENT = object()


def _part(config: Mapping[str, Any], name: str) -> tuple[Any, str]:
    *above, last = name.split(".")
    for step in above:
        config = config[step]
    return config, last


def _others(value: Any) -> list[Any]:
    """Other values of the same kind."""
    if isinstance(value, bool):
        return [not value]
    if type(value) in (int, float):
        return [value + 1, max(1, value // 2)]
    if isinstance(value, list) and len(set(map(str, value))) > 1:
        return [value[::-1]]
    return []
