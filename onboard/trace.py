"""The operations that a module executes, with their scalar constants: the ledger that both sides must agree on.

A dispatch mode sees every ATen operator of the forward pass, whatever code called it. Two implementations of the same
mathematics differ in bookkeeping (views, copies, gathers) and in how they spell a step (a fused attention operator, a
loop over experts); those spellings are named here once. What remains, arithmetic and constants, must be the same.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# Where several operators spell the same arithmetic: which steps each one is.
_SPELLINGS: dict[str, tuple[str, ...]] = {
    "mm": ("matmul",),
    "bmm": ("matmul",),
    "addmm": ("matmul", "add"),
    "baddbmm": ("matmul", "add"),
    "linear": ("matmul",),
    "matmul": ("matmul",),
    "_grouped_mm": ("matmul",),
    "index_add_": ("add",),
    "index_add": ("add",),
    "scatter_add": ("add",),
    "sum": ("add",),
    "mean": ("add", "mean"),
    "_softmax": ("softmax",),
    "_scaled_dot_product_flash_attention_for_cpu": ("matmul", "mul", "softmax"),
    "_scaled_dot_product_attention_math": ("matmul", "mul", "softmax"),
    "_scaled_dot_product_fused_attention_overrideable": ("matmul", "mul", "softmax"),
    "square": ("pow",),
    "neg": ("mul",),  # a rotation negates half of the channels, subtracts them, or is one complex product
    "sub": ("add",),
    "rsub": ("add",),
    "div": ("div",),
    "reciprocal": ("div",),
    "clamp_min": ("clamp",),
    "clamp_max": ("clamp",),
    "sigmoid": ("sigmoid",),
}
_ARITHMETIC = {
    "add", "mul", "div", "pow", "sqrt", "rsqrt", "exp", "log", "log1p", "abs", "tanh", "silu", "gelu", "relu",
    "sigmoid", "softplus", "clamp", "sin", "cos", "topk", "sort", "cumsum", "logsumexp", "erf", "max", "min", "maximum",
    "minimum", "log_softmax", "amax", "var", "var_mean", "native_layer_norm", "sign", "floor", "round", "convolution",
    "exp2", "gt", "ge", "lt", "le", "eq", "ne",
}  # fmt: skip
# Linear bookkeeping that either side may do any number of times: copies of heads, masks, weighted sums.
_FREE = {"add", "mul", "matmul"}
_SCALAR_ARGUMENTS = {
    "add",
    "sub",
    "rsub",
    "mul",
    "div",
    "pow",
    "clamp",
    "clamp_min",
    "clamp_max",
    "softplus",
    "gt",
    "ge",
    "lt",
    "le",
}


@dataclass
class Operations:
    """steps: arithmetic executed. constants: scalars that entered it, masks' infinities left out."""

    steps: set[str] = field(default_factory=set)
    constants: set[float] = field(default_factory=set)

    def difference(self, other: "Operations") -> list[str]:
        """What this one does and the other does not, one line each."""
        lines = [f"step {step}" for step in sorted(self.steps - other.steps - _FREE)]
        return lines + [f"constant {value!r}" for value in sorted(self.constants) if not _among(value, other.constants)]


def _among(value: float, constants: set[float]) -> bool:
    return any(abs(value - other) <= 1e-12 * max(abs(value), abs(other)) for other in constants)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = Operations()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        plain = name if name in _SPELLINGS else name.rstrip("_")
        output = func(*args, **kwargs)
        if not _floating(args, output):
            return output
        for step in _SPELLINGS.get(plain, (plain,)):
            if step in _ARITHMETIC or step in {"matmul", "softmax", "mean"}:
                self.operations.steps.add(step)
        scalars: list[Any] = []
        if plain in _SCALAR_ARGUMENTS:
            scalars = [arg for arg in args[1:] if isinstance(arg, (int, float)) and not isinstance(arg, bool)]
        if "scale" in kwargs and kwargs["scale"] is not None:
            scalars.append(kwargs["scale"])
        for value in scalars:
            if abs(value) not in {0.0, 1.0, float("inf")} and abs(value) < 1e30:
                self.operations.constants.add(float(value))
        return output


def _floating(args: Any, output: Any) -> bool:
    flat = [*args, *(output if isinstance(output, (tuple, list)) else (output,))]
    return any(isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() > 0 for x in flat)


def trace(function: Callable[[], Any]) -> Operations:
    """The operations of one call."""
    with torch.no_grad(), _Recorder() as recorder:
        function()
    return recorder.operations
