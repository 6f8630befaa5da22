"""Plain data that stands for what a lifted class is constructed with and handed."""

from collections.abc import Mapping
from typing import Any

import torch


class Namespace:
    """The values that a lifted class reads from its config, as attributes. Raises AttributeError for any other."""

    def __init__(self, values: Mapping[str, Any]):
        vars(self).update({name: settings_value(value) for name, value in values.items()})

    def __repr__(self) -> str:
        return f"Namespace({', '.join(sorted(vars(self)))})"


def settings_value(value: Any) -> Any:
    """The object that a setting stands for: {"namespace": {...}} a config, {"picked": {...}} configs by
    number or word, {"dtype": "float32"} a dtype."""
    if isinstance(value, Mapping):
        if value.keys() == {"namespace"}:
            return Namespace(value["namespace"])
        if value.keys() == {"picked"}:
            return {int(key) if key.isdigit() else key: settings_value(held) for key, held in value["picked"].items()}
        if value.keys() == {"dtype"}:
            return getattr(torch, value["dtype"])
        return {name: settings_value(held) for name, held in value.items()}
    return [settings_value(held) for held in value] if isinstance(value, list) else value
