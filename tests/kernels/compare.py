"""Outputs and gradients of an operator, and how far they are from the exact ones. Runs here and in the worker."""

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Allowed on top of twice the plain reference's error, which may be zero by luck: a few units of float32, and for the
# narrow dtypes far less than their own unit.
TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 1e-4, torch.float16: 1e-5}


def resolve(target: str | Callable) -> Callable:
    """The function that "package.module:name" names; a dot in the name is an attribute."""
    if not isinstance(target, str):
        return target
    module, names = target.split(":")
    found = import_module(module)
    for name in names.split("."):
        found = getattr(found, name)
    return found


def gradients(
    target: str | Callable, inputs: dict[str, Any], frozen: tuple[str, ...] = (), recompute: bool = False, **constants
) -> dict[str, Tensor | None]:
    """The output as "out" and the gradient of every floating input by name, for one fixed random output gradient.

    inputs: in the order of the function's arguments, with their strides. frozen: those that take no gradient.
    """
    leaves = {
        name: value.detach().requires_grad_(name not in frozen)
        for name, value in inputs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    call = resolve(target)
    arguments = (inputs | leaves).values()
    out = checkpoint(call, *arguments, use_reentrant=False, **constants) if recompute else call(*arguments, **constants)
    generator = torch.Generator().manual_seed(1)
    out.backward(torch.randn(out.shape, generator=generator, dtype=torch.float64).to(out.dtype))
    return {"out": out.detach(), **{name: leaf.grad for name, leaf in leaves.items()}}


def launches(target: str, kernel: str, inputs: dict[str, Any], frozen: tuple[str, ...] = (), **constants) -> int:
    """How often the Triton kernel of this name is launched while `gradients` runs."""
    module = import_module(target.split(":")[0])
    original, count = getattr(module, kernel), 0

    class Counting:
        def __getitem__(self, grid):
            nonlocal count
            count += 1
            return original[grid]

    setattr(module, kernel, Counting())
    try:
        gradients(target, inputs, frozen, **constants)
    finally:
        setattr(module, kernel, original)
    return count


def wide(inputs: dict[str, Any]) -> dict[str, Any]:
    """The same values in float64."""
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in inputs.items()
    }


def relative_error(got: Tensor, want: Tensor) -> float:
    """||got - want|| / ||want||, infinite for NaN and for anything but zero in place of zero."""
    difference = (got.double() - want.double()).norm().item()
    if difference != difference:
        return float("inf")
    norm = want.double().norm().item()
    return difference / norm if norm else 0.0 if difference == 0 else float("inf")


def assert_as_good_as(
    got: dict[str, Tensor], plain: dict[str, Tensor], exact: dict[str, Tensor], dtype: torch.dtype
) -> None:
    """Every tensor of `got` as near to `exact`, twice over, as the plain reference's in the same dtype."""
    assert got.keys() == exact.keys()
    for name, want in exact.items():
        assert got[name].dtype == plain[name].dtype, name
        assert got[name].shape == want.shape, name
        allowed = 2 * relative_error(plain[name], want) + TOLERANCE[dtype]
        assert relative_error(got[name], want) <= allowed, name
