"""A tensor as a sum of others, by least squares."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dayzero.onboard.oracle.calls import same

_EXACT = 1e-9  # relative; a sum that misses by more is none


def solve(wanted: Tensor, values: Mapping[str, Tensor]) -> dict[str, float]:
    """`wanted` as a linear combination of `values` (least squares): the terms with their factors, {} if it is none.

    A value that equals an earlier one is left out: it is the same value under another name.
    """
    names: list[str] = []
    for name, value in values.items():
        if value.numel() == wanted.numel():
            if same(value.reshape(wanted.shape), wanted):
                return {name: 1.0}
            if not any(same(value.reshape(wanted.shape), values[other].reshape(wanted.shape)) for other in names):
                names.append(name)
    if not names or not bool(wanted.isfinite().all()):
        return {}
    basis = torch.stack([values[name].reshape(-1) for name in names], 1)
    target = wanted.reshape(-1, 1)
    factors = torch.linalg.lstsq(basis, target, driver="gelsd").solution[:, 0]
    if not torch.linalg.norm(basis @ factors[:, None] - target) <= _EXACT * torch.linalg.norm(target):
        return {}
    sizes = basis.norm(dim=0) / target.norm()
    kept = {
        name: _cleaned(float(factor))
        for name, factor, size in zip(names, factors, sizes, strict=True)
        if abs(float(factor * size)) > _EXACT
    }
    again = sum(values[name].reshape(-1) * factor for name, factor in kept.items())
    exact = torch.linalg.norm(again - target[:, 0]) <= _EXACT * torch.linalg.norm(target)
    return kept if bool(exact) else {}


def _cleaned(factor: float) -> float:
    """The nearest short decimal where the factor is one up to rounding."""
    short = float(f"{factor:.10g}")
    return short if abs(short - factor) <= 1e-11 * abs(factor) else factor
