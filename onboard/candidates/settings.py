"""Where a number of a model's settings is held, however deep, and what stands beside it."""

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from dayzero.onboard.candidates.evidence import Evidence, read_by

_DEPTH = 3  # of settings inside settings

Path = tuple[str, ...]


def walk(held: Any, path: Path) -> Iterator[tuple[Path, Any]]:
    """Every value inside the config, with where it is; what is nested deeper than `_DEPTH` as it is."""
    fields = fields_of(held)
    if fields is None or len(path) >= _DEPTH:
        yield path, held
        return
    for name in sorted(fields):
        if not name.startswith("_"):
            yield from walk(fields[name], (*path, name))


def fields_of(held: Any) -> Mapping[str, Any] | None:
    if isinstance(held, Mapping):
        return {str(name): value for name, value in held.items()}
    return vars(held) if hasattr(held, "to_dict") else None


def at(config: Any, path: Path) -> Any:
    for name in path:
        config = (fields_of(config) or {})[name]
    return config


def number(path: Path, kind: type) -> Evidence:
    """What the config holds there, as this kind of number."""
    return Evidence(f"config {'.'.join(path)}", lambda module, config: kind(at(read_by(module, config), path)))


def setting(theta: Path, name: str, kind: type, default: Any = None) -> Evidence:
    """The setting `name` beside the base; `default` where it is absent or None."""
    where = theta[:-1]

    def resolve(module: nn.Module, config: Any) -> Any:
        value = (fields_of(at(read_by(module, config), where)) or {}).get(name)
        value = default if value is None else value
        return None if value is None else kind(value)

    shown = "" if default is None else f", {default} if absent"
    return Evidence(f"config {'.'.join((*where, name))}{shown}", resolve)
