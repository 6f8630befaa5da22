"""Activation functions by the name that configs give them."""

from collections.abc import Callable
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "relu2"]


def activation(name: Activation) -> Callable[[Tensor], Tensor]:
    """The function itself. Raises ValueError for a name that is not one of `Activation`."""
    match name:
        case "silu":
            return F.silu
        case "gelu":
            return F.gelu
        case "gelu_tanh":
            return lambda x: F.gelu(x, approximate="tanh")
        case "relu":
            return F.relu
        case "relu2":
            return lambda x: torch.square(F.relu(x))
    raise ValueError(f"activation {name!r} is not one of {', '.join(get_args(Activation))}")
