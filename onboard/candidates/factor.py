"""Where a constant factor of the model's wiring comes from: a residual multiplier, an embedding scale, a softcap."""

from collections.abc import Iterator, Sequence
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
    # The share of a sum of n independent terms that n - 1, or n - 2, of them have: residuals scaled by depth.
    "sqrt(1 - 1 / {})": lambda value: max(0.0, 1.0 - 1.0 / value) ** 0.5,
    "sqrt(1 - 2 / {})": lambda value: max(0.0, 1.0 - 2.0 / value) ** 0.5,
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
    return literal(1.0, "plain sum") if factor == 1.0 else next(_explanations(factor, module, config), None)


def explain_in_all(factors: Sequence[float], modules: Sequence[nn.Module], config: Any) -> Evidence | None:
    """The nearest explanation that gives every factor, the n-th at the n-th module: one layer alone may have a number
    that gives its factor by accident. None where there is no such explanation."""
    if all(factor == 1.0 for factor in factors):
        return literal(1.0, "plain sum")
    pairs = zip(factors, modules, strict=True)
    found = [{evidence.label: evidence for evidence in _explanations(*pair, config)} for pair in pairs]
    common = (evidence for label, evidence in found[0].items() if all(label in other for other in found))
    return next(common, None)


def _explanations(factor: float, module: nn.Module, config: Any) -> Iterator[Evidence]:
    for form, function in _FORMS.items():
        for label, read in _numbers(module, config):
            value = read(module, config)
            positive = isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0
            if positive and abs(function(value) - factor) <= 1e-10 * abs(factor):
                yield Evidence(
                    form.format(label), lambda m, c, read=read, function=function: float(function(read(m, c)))
                )


def _numbers(module: nn.Module, config: Any) -> Iterator[tuple[str, Any]]:
    for name, held in sorted(vars(module).items()):
        if isinstance(held, (int, float)) and not name.startswith("_"):
            yield f"attribute {name}", lambda m, c, name=name: getattr(m, name)
    for name, held in sorted(config.to_dict().items()):
        if isinstance(held, (int, float)):
            yield f"config {name}", lambda m, c, name=name: getattr(c, name, None)
