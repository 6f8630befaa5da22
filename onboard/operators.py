"""Which operators a model calls and at which sizes: what is rendered into a package's operators/ folder."""

from dataclasses import dataclass
from typing import Any

from dayzero.runtime.spec import BlockSpec, ModelSpec


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

def inputs(size: dict, tokens: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """x: [tokens, width], weight: [width], float32."""
    x = torch.randn(tokens, size["width"], generator=generator)
    return x, 1.0 - size["offset"] + 0.1 * torch.randn(size["width"], generator=generator)


def call(size: dict, x: Tensor, weight: Tensor) -> Tensor:
    return rms_norm(x, weight, size["eps"], size["offset"])
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


def operator_calls(spec: ModelSpec) -> list[OperatorCalls]:
    """The operators of every block of the model, sorted by name, each size once."""
    sizes: dict[str, list[dict[str, Any]]] = {}

    def add(name: str, **size: Any) -> None:
        held = sizes.setdefault(name, [])
        if size not in held:
            held.append(size)

    for block in spec.blocks():
        for inner in block.walk():
            _add_calls(inner, add)
    found = []
    for name in sorted(sizes):
        note, body = _BODIES[name]
        found.append(OperatorCalls(name, backend_names(name), sizes[name], note, body))
    return found


def _add_calls(block: BlockSpec, add: Any) -> None:
    held = block.arguments
    match block.block:
        case "RMSNorm" if held.get("scaled", True) and held.get("groups", 1) == 1:
            add("rms_norm", width=held["width"], eps=held["eps"], offset=held.get("offset", 0.0))
        case "GroupedQueryAttention" if held.get("qk_norm", "none") != "none":
            whole = held["qk_norm"] == "whole"
            for heads in (held["heads"], held["kv_heads"]):
                width = held["head_dim"] * (heads if whole else 1)
                add("rms_norm", width=width, eps=held["qk_norm_eps"], offset=held["qk_norm_offset"])
        case "GatedFeedForward":
            _add_swiglu(held, add)
        case "Experts":
            experts, hidden, width = held["experts"], held["hidden"], held["width"]
            is_gated = held.get("is_gated", True)
            if is_gated:
                _add_swiglu(held, add)
            add("grouped_gemm", experts=experts, rows=(1 + is_gated) * width, columns=hidden)
            add("grouped_gemm", experts=experts, rows=hidden, columns=width)


def _add_swiglu(held: dict[str, Any], add: Any) -> None:
    """The gates that the operator computes: silu, clamped before it or not at all."""
    act = held["act"]
    if act == "silu":
        add("swiglu", width=held["width"], limit=None)
    elif isinstance(act, BlockSpec) and act.block == "ClampedGLU":
        operator_does = act.arguments["act"] == "silu" and not act.arguments.get("after", False)
        if operator_does:
            add("swiglu", width=held["width"], limit=act.arguments["limit"])


def backend_names(name: str) -> list[str]:
    """Backends of an operator in order of preference, the reference last."""
    import importlib

    operator = getattr(importlib.import_module(f"dayzero.kernels.{name}"), name)
    return [backend.name for backend in operator.backends]
