"""Where a constant factor of the model's wiring comes from: a residual multiplier, an embedding scale, a softcap."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from dayzero.onboard.candidates.evidence import Evidence, literal

_FORMS = {
    "{}": lambda value: value,
    "1 / {}": lambda value: 1.0 / value,
    "sqrt({})": lambda value: value**0.5,
    "1 / sqrt({})": lambda value: value**-0.5,
    "1 - {}": lambda value: 1.0 - value,
    "float32 sqrt({})": lambda value: float(torch.tensor(value**0.5, dtype=torch.float32)),
    "bfloat16 sqrt({})": lambda value: float(torch.tensor(value**0.5, dtype=torch.bfloat16)),
}


def explain_factor(factor: float, module: nn.Module, config: Any) -> Evidence:
    """The nearest number that gives `factor`: the module's own attributes first, then config fields, each as it is or
    in one of the forms that models use; the literal where none does. 1 needs no explanation."""
    found = find_factor(factor, module, config)
    return literal(factor, "solved; no field of the config gives it") if found is None else found


def find_factor(factor: float, module: nn.Module, config: Any) -> Evidence | None:
    """As `explain_factor`, but None where no attribute and no field gives it."""
    if factor == 1.0:
        return literal(1.0, "plain sum")
    for form, function in _FORMS.items():
        for label, read in _numbers(module, config):
            value = read(module, config)
            positive = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
            if positive and abs(function(value) - factor) <= 1e-10 * abs(factor):
                return Evidence(
                    form.format(label), lambda m, c, read=read, function=function: float(function(read(m, c)))
                )
    return None


def _numbers(module: nn.Module, config: Any) -> Iterator[tuple[str, Any]]:
    for name, held in sorted(vars(module).items()):
        if isinstance(held, (int, float)) and not name.startswith("_"):
            yield f"attribute {name}", lambda m, c, name=name: getattr(m, name)
    for name, held in sorted(config.to_dict().items()):
        if isinstance(held, (int, float)):
            yield f"config {name}", lambda m, c, name=name: getattr(c, name, None)
