"""Small equivalents of what lifted code imports from the library that it was written for.

Lifted source (`runtime.nn.lifted`) is eager and trains packed documents, so attention and experts have one form,
nothing is cached, and nothing is traced or exported.
"""

import contextlib
import math
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

__all__ = [
    "ACT2FN",
    "ALL_ATTENTION_FUNCTIONS",
    "GradientCheckpointingLayer",
    "PreTrainedModel",
    "initialization",
    "is_torch_greater_or_equal",
    "is_torchdynamo_compiling",
    "is_torchdynamo_exporting",
    "maybe_autocast",
]


def _gelu_new(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0))))


def _gelu_fast(x: Tensor) -> Tensor:
    return 0.5 * x * (1.0 + torch.tanh(x * 0.7978845608 * (1.0 + 0.044715 * x * x)))


_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": F.gelu,
    "gelu_fast": _gelu_fast,
    "gelu_new": _gelu_new,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "hardswish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "linear": lambda x: x,
    "mish": F.mish,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "relu2": lambda x: torch.square(F.relu(x)),
    "relu6": F.relu6,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sqrtsoftplus": lambda x: F.softplus(x).sqrt(),
    "swish": F.silu,
    "tanh": torch.tanh,
}


class _Activation(nn.Module):
    """One elementwise function of `_ACTIVATIONS`."""

    def __init__(self, name: str):
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Tensor:
        return _ACTIVATIONS[self.name](x)

    def extra_repr(self) -> str:
        return self.name


class _Activations:
    """Activation name -> a new module that computes it. Raises KeyError for a name that is not known."""

    def __getitem__(self, name: str) -> nn.Module:
        if name not in _ACTIVATIONS:
            raise KeyError(f"no activation {name!r}; there are {', '.join(sorted(_ACTIVATIONS))}")
        return _Activation(name)

    def __contains__(self, name: object) -> bool:
        return name in _ACTIVATIONS


ACT2FN = _Activations()


class _OneAttention:
    """Attention as the lifted code itself spells it, whatever form is asked for."""

    def get_interface(self, name: str, default: Callable) -> Callable:
        return default


ALL_ATTENTION_FUNCTIONS = _OneAttention()


class GradientCheckpointingLayer(nn.Module):
    """A layer. Recomputation is the runtime's."""


class PreTrainedModel(nn.Module):
    """A model with a config. Weights are the runtime's."""

    def __init__(self, config: Any):
        super().__init__()
        self.config = config

    def post_init(self) -> None:
        """Nothing is left to do."""


class _Initialization:
    """torch.nn.init, and copies. Without memory nothing is set."""

    def __getattr__(self, name: str) -> Callable:
        return getattr(nn.init, name)

    def copy_(self, tensor: Tensor, other: Tensor) -> Tensor:
        with torch.no_grad():
            return tensor.copy_(other)


initialization = _Initialization()


def maybe_autocast(device_type: str, dtype: torch.dtype | None = None, enabled: bool = True, **unused: Any):
    """Autocast where it is wanted, or must be turned off; otherwise nothing."""
    if device_type != "meta" and (enabled or torch.is_autocast_enabled(device_type)):
        return torch.autocast(device_type, dtype=dtype, enabled=enabled)
    return contextlib.nullcontext()


def is_torch_greater_or_equal(version: str, accept_dev: bool = False) -> bool:
    """Whether torch is of that version or a later one."""
    ours, theirs = ([int(part) for part in re.findall(r"\d+", text)[:2]] for text in (torch.__version__, version))
    return ours >= theirs


def is_torchdynamo_compiling() -> bool:
    return torch.compiler.is_compiling()


def is_torchdynamo_exporting() -> bool:
    return torch.compiler.is_exporting()
