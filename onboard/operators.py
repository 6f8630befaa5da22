"""Which operators a model calls and at which sizes: what is rendered into a package's operators/ folder."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dayzero.runtime.dry_pass import operators_called
from dayzero.runtime.nn import Lifted
from dayzero.runtime.spec import ModelSpec


@dataclass
class OperatorCalls:
    """One operator. sizes: distinct argument sizes, as literals. body: Python that makes inputs and calls it."""

    name: str
    backends: list[str]
    sizes: list[dict[str, Any]]
    sizes_note: str
    body: str


_BODIES = {
    "rms_norm": (
        "width and constants of every norm",
        '''

def inputs(size: dict, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor | None]:
    """x: [tokens, width], weight: [width] or None where it does not scale, float32."""
    x = torch.randn(tokens, size["width"], generator=generator)
    weight = 1.0 - size["offset"] + 0.1 * torch.randn(size["width"], generator=generator)
    return x, weight if size.get("scaled", True) else None


def call(size: dict, x: Tensor, weight: Tensor | None) -> Tensor:
    after_cast = size.get("weight_after_cast", True)
    return rms_norm(x, weight, size["eps"], size["offset"], weight_after_cast=after_cast)
''',
    ),
    "swiglu": (
        "width and limit of every gated activation",
        '''

def inputs(size: dict, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """gate, up: [tokens, width], float32."""
    gate, up = torch.randn(2, tokens, size["width"], generator=generator)
    return gate, up


def call(size: dict, gate: Tensor, up: Tensor) -> Tensor:
    return swiglu(gate, up, size["limit"])
''',
    ),
    "grouped_gemm": (
        "the two products of the routed experts: [rows, columns] of each expert's matrix",
        '''

def inputs(size: dict, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """x: [tokens, columns] sorted by expert, weight: [experts, rows, columns], counts: [experts]; at most 4 experts."""
    experts = min(size["experts"], 4)
    x = torch.randn(tokens, size["columns"], generator=generator)
    weight = torch.randn(experts, size["rows"], size["columns"], generator=generator) * size["columns"] ** -0.5
    index = torch.randint(0, experts, (tokens,), generator=generator)
    return x, weight, torch.bincount(index, minlength=experts)


def call(size: dict, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return grouped_gemm(x, weight, counts)
''',
    ),
}


KERNELS = tuple(_BODIES)


def operator_calls(spec: ModelSpec) -> list[OperatorCalls]:
    """The operators that a forward pass calls, sorted by name, each size once: those of a pass without values over one
    layer of each kind."""
    sizes: dict[str, list[dict[str, Any]]] = {}

    def see(name: str, *args: Any, **kwargs: Any) -> None:
        size, held = _SIZES[name](*args, **kwargs), sizes.setdefault(name, [])
        if size not in held:
            held.append(size)

    with torch.device("meta"):
        model = spec.one_of_each_kind()[0].build()
    try:
        operators_called(model, see)
    except (NotImplementedError, RuntimeError, ValueError, TypeError, KeyError, IndexError):
        copied = [module for module in model.modules() if isinstance(module, Lifted)]
        if not copied:
            raise
        for module in copied:  # it looks at values, which there are none of; what it passes on is all that is asked
            module.forward = lambda x, *others: x
        operators_called(model, see)
    found = []
    for name in sorted(sizes):
        note, body = _BODIES[name]
        found.append(OperatorCalls(name, backend_names(name), sizes[name], note, body))
    return found


def _rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, *, weight_after_cast: bool = True
) -> dict[str, Any]:
    size = {"width": x.shape[-1], "eps": eps, "offset": offset}
    size |= {"scaled": False} if weight is None else {}
    return size if weight_after_cast else {**size, "weight_after_cast": False}


def _swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> dict[str, Any]:
    return {"width": gate.shape[-1], "limit": limit}


def _grouped_gemm(x: Tensor, weight: Tensor, counts: Tensor) -> dict[str, Any]:
    return {"experts": weight.shape[0], "rows": weight.shape[1], "columns": weight.shape[2]}


_SIZES: dict[str, Callable[..., dict[str, Any]]] = {
    "rms_norm": _rms_norm,
    "swiglu": _swiglu,
    "grouped_gemm": _grouped_gemm,
}


def backend_names(name: str) -> list[str]:
    """Backends of an operator in order of preference, the reference last."""
    import importlib

    operator = getattr(importlib.import_module(f"dayzero.kernels.{name}"), name)
    return [backend.name for backend in operator.backends]
