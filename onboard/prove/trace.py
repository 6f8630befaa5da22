"""The operations that a module executes, with their scalar constants: the ledger that both sides must agree on.

A dispatch mode sees every ATen operator of the forward pass, whatever code called it. Two implementations of the same
mathematics differ in bookkeeping (views, copies, gathers) and in how they spell a step (a fused attention operator, a
loop over experts); those spellings are named here once. What remains, arithmetic and constants, must be the same.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
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
    "square": ("pow",),  # with the constant 2
    "native_layer_norm": ("mean", "add", "pow", "rsqrt", "mul"),  # with the constants 2 and eps
    "neg": ("mul",),  # a rotation negates half of the channels, subtracts them, or is one complex product
    "sub": ("add",),
    "rsub": ("add",),
    "div": ("div",),
    "reciprocal": ("div",),
    "var": ("mean", "add", "pow"),  # with the constant 2
    "cumsum": ("add",),
    "maximum": ("max",),
    "amax": ("max",),
    "minimum": ("min",),
    "amin": ("min",),
    "clamp_min": ("clamp",),
    "clamp_max": ("clamp",),
    "sigmoid": ("sigmoid",),
}
_ARITHMETIC = {
    "add", "mul", "div", "pow", "sqrt", "rsqrt", "exp", "log", "log1p", "abs", "tanh", "silu", "gelu", "relu",
    "sigmoid", "softplus", "clamp", "sin", "cos", "topk", "sort", "logsumexp", "erf", "max", "min", "maximum",
    "minimum", "log_softmax", "log_sigmoid_forward", "amax", "var", "var_mean", "sign", "floor", "round", "convolution",
    "exp2", "gt", "ge", "lt", "le", "eq", "ne",
}  # fmt: skip
# Linear bookkeeping that either side may do any number of times: copies of heads, masks, weighted sums, signs.
_FREE = {"add", "mul", "matmul", "neg"}
# Two ways to write one function, each as the steps that it takes; one side may have the one and the other the other.
_SAME = (
    ({"rsqrt"}, {"sqrt", "div"}),
    ({"max", "softmax"}, {"softmax"}),  # softmax of what its maximum was taken from already
    ({"logsumexp", "sigmoid", "softmax"}, {"softmax"}),  # what a sink leaves of a row, as a factor of the row
    ({"softplus"}, {"exp", "log", "gt"}),  # written out, with the threshold above which it is its input
)
# Comparisons with 0 or an infinity that only ask what a mask hides.
_OF_A_MASK = {"eq", "ne", "isinf", "isneginf"}
_SOFTPLUS_THRESHOLD = 20.0  # ATen's default, which a call that does not name it uses
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
    "native_layer_norm",
}
# Powers that have a name of their own.
_POWERS = {-0.5: "rsqrt", 0.5: "sqrt", -1.0: "div"}


@dataclass(frozen=True)
class Step:
    """One operator as it ran. name: without the underscore of those in place. numbers: its scalar arguments, those
    that change nothing included. shape: of its first tensor; gives: of its result. reads, makes: the
    widest dtypes of floating-point numbers in its arguments and in its result."""

    name: str
    numbers: tuple[float, ...]
    shape: tuple[int, ...]
    gives: tuple[int, ...] = field(default=(), compare=False)
    reads: torch.dtype | None = field(default=None, compare=False)
    makes: torch.dtype | None = field(default=None, compare=False)

    @property
    def dtype(self) -> torch.dtype | None:
        """Which it computes in."""
        held = [dtype for dtype in (self.reads, self.makes) if dtype is not None]
        return max(held, key=lambda dtype: dtype.itemsize, default=None)

    @property
    def arithmetic(self) -> set[str]:
        """The arithmetic that it is, under the names that `Operations` gives; empty for bookkeeping."""
        return {step for step in _SPELLINGS.get(self.name, (self.name,)) if _is_arithmetic(step)}


@dataclass
class Operations:
    """steps: arithmetic executed. constants: scalars that entered it, masks' infinities left out.
    sequence: every operator on floating-point tensors, in the order in which they ran."""

    steps: set[str] = field(default_factory=set)
    constants: set[float] = field(default_factory=set)
    sequence: list[Step] = field(default_factory=list)

    @property
    def ledger(self) -> str:
        """All of it in one line, for the report: the arithmetic, then the constants that entered it."""
        numbers = ", ".join(f"{value:.10g}" for value in sorted(self.constants))
        steps = ", ".join(sorted(self.steps)) or "no arithmetic"
        return f"{steps}; constants {numbers}" if numbers else f"{steps}; no constants"

    def difference(self, other: "Operations") -> list[str]:
        """What this one does and the other does not, one line each."""
        left = self.steps - other.steps - _FREE
        for one, two in _SAME:
            for mine, theirs in ((one, two), (two, one)):
                if mine <= self.steps and theirs <= other.steps:
                    left -= mine
        lines = [f"step {step}" for step in sorted(left)]
        return lines + [f"constant {value!r}" for value in sorted(self.constants) if not _among(value, other.constants)]


def _among(value: float, constants: set[float]) -> bool:
    return any(abs(value - other) <= 1e-12 * max(abs(value), abs(other)) for other in constants)


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations = Operations()
        self.paused = 0  # modules that are running and are none of ours to look into

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        plain = name if name in _SPELLINGS else name.rstrip("_")
        output = func(*args, **kwargs)
        if self.paused or not _floating(args, output):
            return output
        numbers = tuple(float(arg) for arg in _flat(args) if _is_number(arg))
        shapes = _first_shape(args), _first_shape([output])
        self.operations.sequence.append(Step(plain, numbers, *shapes, _widest(args), _widest([output])))
        if plain in _OF_A_MASK and all(abs(number) in {0.0, float("inf")} for number in numbers):
            return output
        if plain == "pow" and numbers and numbers[-1] in _POWERS:
            plain, args = _POWERS[numbers[-1]], args[:1]
        for step in _SPELLINGS.get(plain, (plain,)):
            if _is_arithmetic(step):
                self.operations.steps.add(step)
        scalars: list[Any] = []
        if plain in _SCALAR_ARGUMENTS:
            scalars = [arg for arg in args[1:] if _is_number(arg)]
        if plain in {"square", "var", "native_layer_norm"}:
            scalars.append(2.0)
        if plain == "softplus" and len(args) < 3:
            scalars.append(_SOFTPLUS_THRESHOLD)
        if "scale" in kwargs and kwargs["scale"] is not None:
            scalars.append(kwargs["scale"])
        for value in scalars:
            if abs(value) not in {0.0, 1.0, float("inf")} and abs(value) < 1e30:
                self.operations.constants.add(float(value))
        return output


def _is_arithmetic(step: str) -> bool:
    return step in _ARITHMETIC or step in {"matmul", "softmax", "mean"}


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _flat(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, (tuple, list)):
            yield from _flat(value)
        else:
            yield value


def _first_shape(args: Any) -> tuple[int, ...]:
    return next((tuple(arg.shape) for arg in _flat(args) if isinstance(arg, torch.Tensor)), ())


def _widest(values: Any) -> torch.dtype | None:
    """Of the floating-point tensors, the dtype of most bits."""
    held = [x.dtype for x in _flat(values) if isinstance(x, torch.Tensor) and x.is_floating_point()]
    return max(held, key=lambda dtype: dtype.itemsize, default=None)


def _floating(args: Any, output: Any) -> bool:
    flat = [*args, *(output if isinstance(output, (tuple, list)) else (output,))]
    return any(isinstance(x, torch.Tensor) and x.is_floating_point() and x.numel() > 0 for x in flat)


_RUNNING: list[_Recorder] = []


def trace(function: Callable[[], Any]) -> Operations:
    """The operations of one call."""
    with torch.no_grad(), _Recorder() as recorder:
        _RUNNING.append(recorder)
        try:
            function()
        finally:
            _RUNNING.pop()
    return recorder.operations


def trace_around(function: Callable[[], Any], inside: Mapping[str, nn.Module]) -> Operations:
    """The operations of one call, but for those of the modules in `inside`, each of whose calls is one step by the name
    that it has there."""
    with torch.no_grad(), _Recorder() as recorder:

        def enter() -> None:
            recorder.paused += 1

        def leave(name: str, args: Any, output: Any) -> None:
            recorder.paused -= 1
            recorder.operations.sequence.append(Step(name, (), _first_shape(args), _first_shape([output])))

        with _followed(inside.items(), enter, leave):
            function()
    return recorder.operations


def trace_modules(model: nn.Module, function: Callable[[], Any]) -> dict[str, list[Step]]:
    """The operators of one call by the path of the module that ran them; a module's are also those of its holders."""
    found: dict[str, list[Step]] = {}
    open_calls: list[int] = []
    with torch.no_grad(), _Recorder() as recorder:

        def enter() -> None:
            open_calls.append(len(recorder.operations.sequence))

        def leave(path: str, args: Any, output: Any) -> None:
            found.setdefault(path, []).extend(recorder.operations.sequence[open_calls.pop() :])

        with _followed(model.named_modules(), enter, leave):
            function()
    return found


@contextlib.contextmanager
def _followed(
    modules: Iterable[tuple[str, nn.Module]], enter: Callable[[], None], leave: Callable[[str, Any, Any], None]
) -> Iterator[None]:
    """`enter()` before each call of one of the modules, `leave(name, args, output)` after it."""
    handles = []
    for name, module in modules:
        handles.append(module.register_forward_pre_hook(lambda module, args: enter()))
        handles.append(module.register_forward_hook(lambda module, args, output, name=name: leave(name, args, output)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def forget() -> None:
    """What is traced begins here: of what ran before, a part of a module's code, nothing is noted."""
    for recorder in _RUNNING[-1:]:
        recorder.operations = Operations()
