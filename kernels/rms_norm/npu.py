"""rms_norm by torch_npu's fused operator, which has its own gradient."""

import torch
from torch import Tensor

from dayzero.kernels.devices import UP_TO_FLOAT32, npu_supports
from dayzero.kernels.registry import Backend


def supports(
    x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, *, weight_after_cast: bool = True
) -> tuple[bool, str]:
    """(ok, reason). The operator multiplies by one weight in x.dtype, which cannot hold offset + weight exactly."""
    if weight is not None and weight.dtype != x.dtype:
        return False, f"npu_rms_norm needs weight in the dtype of x, {x.dtype}; found {weight.dtype}"
    if offset != 0 and weight is not None and x.dtype != torch.float32:
        return False, f"npu_rms_norm would round {offset} + weight to {x.dtype}"
    return npu_supports(("npu_rms_norm",), UP_TO_FLOAT32, x)


def _call(
    x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, *, weight_after_cast: bool = True
) -> Tensor:
    if weight is None:
        weight = x.new_ones(x.shape[-1])
    elif offset != 0:
        weight = offset + weight
    return torch.ops.npu.npu_rms_norm(x, weight, epsilon=eps)[0]


backend = Backend("npu", supports, _call)
