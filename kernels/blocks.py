"""Some rows at a time, for operators on a CPU: what is in between in float32 stays in the cache."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dayzero.kernels.devices import plain, rows

_BLOCK = 1 << 15  # numbers of each tensor at a time: 128 KiB in float32


def supports(*tensors: Tensor) -> tuple[bool, str]:
    """(ok, reason): whether all are plain floating-point tensors on a CPU."""
    device = tensors[0].device.type
    if device != "cpu":
        return False, f"blocks are for the cache of a CPU, not for {device}"
    return plain((torch.float64, torch.float32, torch.bfloat16, torch.float16), *tensors)


def blocks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """The same rows of each tensor [..., H], as views [R, H] where the layout allows."""
    if tensors[0].numel():
        height = max(1, _BLOCK // tensors[0].shape[-1])
        yield from zip(*(rows(tensor).split(height) for tensor in tensors), strict=True)
