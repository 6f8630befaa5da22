"""What the backends of all operators need to know about devices. Loads neither Triton nor torch_npu by itself."""

import os
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
UP_TO_FLOAT32 = (torch.float32, *HALF)

# The interpreter runs programs one after another; three are enough to make every persistent loop turn.
_INTERPRETED_PROGRAMS = 3
_PROGRAMS_PER_MULTIPROCESSOR = 8


def lazy(target: str) -> Callable[..., Any]:
    """The function "package.module:name", its module imported by the first call."""
    module, name = target.split(":")

    def call(*args: Any, **kwargs: Any) -> Any:
        return getattr(import_module(module), name)(*args, **kwargs)

    return call


def plain(dtypes: tuple[torch.dtype, ...], *tensors: Tensor) -> tuple[bool, str]:
    """(ok, reason): whether all are ordinary tensors (not fake, not distributed) of one of these dtypes."""
    for tensor in tensors:
        if type(tensor) not in (Tensor, torch.nn.Parameter):
            return False, f"{type(tensor).__name__} instead of a plain tensor"
        if tensor.dtype not in dtypes:
            return False, f"{tensor.dtype} is none of {', '.join(map(str, dtypes))}"
    return True, ""


def triton_supports(*tensors: Tensor) -> tuple[bool, str]:
    """(ok, reason): whether Triton is here and compiles for the tensors' device and dtypes."""
    if not _installed("triton"):
        return False, "Triton is not installed"
    device = tensors[0].device.type
    if device not in ("cuda", "npu") and not _interpreted():
        return False, f"Triton compiles for cuda and npu, not for {device}"
    return plain(UP_TO_FLOAT32, *tensors)


def npu_supports(operators: tuple[str, ...], dtypes: tuple[torch.dtype, ...], *tensors: Tensor) -> tuple[bool, str]:
    """(ok, reason): whether the tensors are on an NPU and torch_npu has these operators."""
    device = tensors[0].device.type
    if device != "npu":
        return False, f"runs on npu, not on {device}"
    missing = [name for name in operators if not hasattr(torch.ops.npu, name)]
    if missing:
        return False, f"this torch_npu has no {', '.join(missing)}"
    return plain(dtypes, *tensors)


@lru_cache
def programs(device: torch.device, matrix: bool = False) -> int:
    """How many programs of a persistent Triton kernel fill the device. matrix: the kernel multiplies matrices."""
    if device.type == "cuda":
        multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
        return multiprocessors if matrix else multiprocessors * _PROGRAMS_PER_MULTIPROCESSOR
    if device.type == "npu":
        driver = import_module("triton.runtime.driver").driver.active
        return driver.utils.get_device_properties(device.index or 0)["num_aicore" if matrix else "num_vectorcore"]
    return _INTERPRETED_PROGRAMS


def rows(x: Tensor) -> Tensor:
    """x: [..., H] as [R, H] with elements of a row side by side; a copy only where the layout demands it."""
    flat = x.reshape(-1, x.shape[-1])
    return flat if flat.stride(-1) == 1 else flat.contiguous()


@lru_cache
def _installed(package: str) -> bool:
    return find_spec(package) is not None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"
