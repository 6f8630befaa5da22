"""The generated shrunk model and its reference, holding the same weights: ours got them through the rules."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from dayzero.onboard.oracle.reference import build, on_disk, redraw
from dayzero.runtime.errors import InputError
from dayzero.runtime.package import Package
from dayzero.runtime.safetensors_reader import TensorsReader
from dayzero.runtime.weights import BoundRule, bind


class NotLoaded(Exception):
    """The generated model cannot be built, or its rules do not fill it. The message names the parameter."""


def loaded_pair(generated: Package, config: Mapping[str, Any], seed: int) -> tuple[Any, nn.Module]:
    """(ours, reference) in float64. Raises NotLoaded."""
    reference, _ = build(config)
    redraw(reference, torch.Generator().manual_seed(seed))
    return load(generated, on_disk(reference)), reference


def load(generated: Package, stored: Mapping[str, torch.Tensor]) -> Any:
    """Our model in float64, filled from tensors as they lie on disk. Raises NotLoaded."""
    try:
        ours = generated.build().to(torch.float64)
        rules = bind(generated.rules)
    except (ValueError, RuntimeError, TypeError) as error:
        raise NotLoaded(f"the generated model cannot be built: {_line(error)}") from None
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    values = {name: _read(name, rule, stored, shapes) for name, rule in rules.items()}
    wanted = {name: tuple(tensor.shape) for name, tensor in ours.state_dict().items()}
    for name in sorted(wanted.keys() | values.keys()):
        if name not in values:
            raise NotLoaded(f"{name}: no rule fills it")
        if name not in wanted:
            raise NotLoaded(f"{name}: a rule for a parameter that the model does not have")
        if tuple(values[name].shape) != wanted[name]:
            raise NotLoaded(f"{name}: its rule gives {tuple(values[name].shape)}, the model has {wanted[name]}")
    ours.load_state_dict(values, strict=True)
    return ours


def _read(
    name: str, rule: BoundRule, stored: Mapping[str, torch.Tensor], shapes: Mapping[str, tuple[int, ...]]
) -> torch.Tensor:
    try:
        return rule.read(TensorsReader(stored), shapes)
    except (InputError, KeyError, ValueError, RuntimeError, IndexError) as error:
        raise NotLoaded(f"{name}: its rule cannot be read: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
