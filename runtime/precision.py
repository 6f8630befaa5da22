"""Which dtype a parameter is kept in, and which one the forward and backward pass compute in."""

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import nn

from dayzero.runtime.headers import TensorHeader
from dayzero.runtime.safetensors_reader import torch_dtype
from dayzero.runtime.weights import Region, Rule, bind

Precision = Literal["bf16", "fp32"]
FROZEN = (torch.bfloat16, torch.float16, torch.float32)


def compute_dtype(precision: Precision) -> torch.dtype | None:
    """The dtype that parameters are cast to for a pass, None for their own."""
    return torch.bfloat16 if precision == "bf16" else None


def keep_parameters(model: nn.Module, precision: Precision, stored: Mapping[str, torch.dtype]) -> None:
    """Sets each parameter's dtype: float32 for what is trained, since small updates vanish in bfloat16.

    A frozen one in a bf16 run keeps the dtype of the checkpoint. stored: parameter name -> that dtype, float32 if it
    is not there. Parameters of the meta device cost nothing.
    """
    for name, parameter in model.named_parameters():
        frozen = precision == "bf16" and not parameter.requires_grad
        parameter.data = parameter.data.to(stored.get(name, torch.float32) if frozen else torch.float32)


def stored_dtypes(rules: Sequence[Rule], headers: Mapping[str, TensorHeader]) -> dict[str, torch.dtype]:
    """Parameter name -> the 16 or 32 bit dtype that holds what its tensors stand for."""
    dtypes = {}
    for name, rule in bind(rules).items():
        if all(source in headers for source in rule.names()):
            held = rule.source.dtype(HeaderDtypes(headers), rule.index)
            if held in FROZEN:
                dtypes[name] = held
    return dtypes


class HeaderDtypes:
    """What the headers alone can tell of a checkpoint's tensors."""

    def __init__(self, headers: Mapping[str, TensorHeader]):
        self.headers = headers

    def dtype(self, name: str) -> torch.dtype:
        return torch_dtype(self.headers[name].dtype)

    def read(self, name: str, region: Region | None = None) -> torch.Tensor:
        raise NotImplementedError
