"""What a copy of the reference's code is constructed with: of configs only the fields that it reads, as plain data."""

import ast
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from dayzero.onboard.lift.closure import Lift, LiftError
from dayzero.onboard.oracle.constructed import built_like, constructed_with


class _Probe:
    """A config that notes which of its fields are read. Nested configs are probes too."""

    def __init__(self, config: Any, names: dict[str, Any], prefix: str = ""):
        vars(self).update(_config=config, _names=names, _prefix=prefix)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._config, name)
        path = self._prefix + name
        if inspect.ismethod(value):
            raise LiftError(f"it calls config.{path}(), which is code of its config class")
        self._names[path] = True
        if isinstance(value, Sequence) and not isinstance(value, (str, list, tuple)):
            return _ProbeList(value, self._names, f"{path}.")
        return _Probe(value, self._names, f"{path}.") if _is_config(value) else value


class _ProbeList:
    """Configs by number or word, as probes."""

    def __init__(self, held: Any, names: dict[str, Any], prefix: str):
        self._held, self._names, self._prefix = held, names, prefix

    def __getitem__(self, key: Any) -> Any:
        self._names[f"{self._prefix}{key}"] = True
        return _Probe(self._held[key], self._names, f"{self._prefix}{key}.")


def _is_config(value: Any) -> bool:
    return hasattr(value, "to_dict") and hasattr(type(value), "model_type")


class Reads:
    """Which fields of which constructor argument the copy reads, and the settings made of them."""

    def __init__(self, cls: type[nn.Module], made: Lift):
        self.cls, self.lift = cls, made
        self.names: dict[str, dict[str, Any]] = {}

    def probes(self, arguments: Mapping[str, Any], names: dict[str, dict[str, Any]]) -> dict[str, Any]:
        """The arguments, configs as probes that note what is read into `names`, by argument."""
        return {
            name: _Probe(value, names.setdefault(name, {})) if _is_config(value) else value
            for name, value in arguments.items()
        }

    def settings(self, module: nn.Module, config: Any) -> dict[str, Any]:
        """The constructor's arguments for this module, as plain data. Raises ValueError for what is none."""
        arguments = constructed_with(module)
        if arguments is None:
            raise ValueError(f"how {type(module).__name__} was constructed is not known")
        arguments = arguments | self._number(module, arguments)
        names = self.construct(arguments)
        settings = {}
        for name, value in arguments.items():
            if _is_config(value):
                settings[name] = _namespace(value, names.get(name, {}) | self.names.get(name, {}))
            else:
                settings[name] = _plain(name, value)
        return settings

    def construct(self, arguments: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
        """Constructs the copy without memory: the fields that it reads then, not the same for every module."""
        names: dict[str, dict[str, Any]] = {}
        with torch.device("meta"):
            try:
                self.cls(**self.probes(arguments, names))
            except (RuntimeError, TypeError, ValueError, AttributeError, KeyError, NotImplementedError) as error:
                raise ValueError(f"{self.cls.__name__} cannot be constructed: {error}") from None
        return names

    def _number(self, module: nn.Module, arguments: Mapping[str, Any]) -> dict[str, int]:
        """The layer's number as that of the first module that is the same in all but its number: where nothing reads
        it, equal layers have equal settings."""
        others = built_like(module)
        for name, value in arguments.items():
            if type(value) is not int or name in self._read_numbers(module, others, name):
                continue
            alike = [
                held[name]
                for other, held in others
                if type(held.get(name)) is int
                and all(_same(held.get(key), arguments[key]) for key in arguments if key != name)
                and _signature(other, held[name]) == _signature(module, value)
            ]
            if len(alike) > 1:
                return {name: min(alike)}
        return {}

    def _read_numbers(self, module: nn.Module, others: list[tuple[nn.Module, dict]], name: str) -> set[str]:
        """{name} if an attribute that holds the number is read outside constructors."""
        members = [(made, held[name]) for made, held in others if type(held.get(name)) is int]
        holders = None
        for made, number in members:
            held = {
                key
                for part in made.modules()
                for key, value in vars(part).items()
                if type(value) is int and value == number
            }
            holders = held if holders is None else holders & held
        return {name} if (holders or set()) & _read_in_calls(self.lift) else set()


def _same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, (int, float, str, bool, type(None), list, tuple)) and a == b)


def _signature(module: nn.Module, number: int) -> tuple:
    """All that an instance holds, its number left out."""
    entries: list[tuple] = [(name, tuple(p.shape)) for name, p in module.named_parameters()]
    for path, part in module.named_modules():
        for name, value in sorted(vars(part).items()):
            if isinstance(value, (bool, int, float, str, type(None), list, tuple)) and not name.startswith("_"):
                own = type(value) is int and value == number
                entries.append((path, name, "its number" if own else repr(value)))
    return tuple(entries)


@functools.lru_cache(maxsize=256)
def _read_in_calls(made: Lift) -> frozenset[str]:
    """Attributes that the copy reads outside constructors."""
    found: set[str] = set()
    for definition in made.definitions:
        for node in ast.walk(ast.parse(definition.text)):
            if isinstance(node, ast.FunctionDef) and node.name != "__init__":
                found |= {
                    part.attr
                    for part in ast.walk(node)
                    if isinstance(part, ast.Attribute) and isinstance(part.ctx, ast.Load)
                }
    return frozenset(found)


def _namespace(config: Any, names: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are read, as `settings_value` understands them."""
    values: dict[str, Any] = {}
    for head in dict.fromkeys(path.partition(".")[0] for path in sorted(names)):
        inner = {name.partition(".")[2]: True for name in names if name.startswith(f"{head}.")}
        if not hasattr(config, head):
            continue
        value = getattr(config, head)
        if _is_config(value):
            values[head] = _namespace(value, inner)
        elif inner:
            keys = dict.fromkeys(path.partition(".")[0] for path in sorted(inner))
            picked = {key: {n.partition(".")[2]: True for n in inner if n.startswith(f"{key}.")} for key in keys}
            held = {key: value[int(key) if key.isdigit() else key] for key in keys}
            values[head] = {"picked": {key: _namespace(held[key], picked[key]) for key in keys}}
        else:
            values[head] = _plain(head, value)
    return {"namespace": values}


def _plain(name: str, value: Any) -> Any:
    """Plain data. Raises ValueError for what cannot be written down."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, (list, tuple)):
        return [_plain(name, held) for held in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _plain(name, held) for key, held in dict(value).items()}
    raise ValueError(f"{name} is {type(value).__name__}, which is no plain data")
