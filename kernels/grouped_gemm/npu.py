"""grouped_gemm by torch_npu's grouped products. They have no gradient of their own."""

import torch
from torch import Tensor

from dayzero.kernels.devices import HALF, npu_supports
from dayzero.kernels.grouped_gemm.autograd import Products, differentiable, zero_tail
from dayzero.kernels.registry import Backend

_ONE_TENSOR = 3  # split_item: one x and one output tensor
_BY_ROWS = 0  # group_type of npu_grouped_matmul: groups are rows of x
_BY_DEPTH = 2  # group_type of npu_grouped_matmul_add_: groups are ranges of the summed dimension
_RUNNING_SUM = 0  # group_list_type: where each group ends


def supports(x: Tensor, weight: Tensor, counts: Tensor) -> tuple[bool, str]:
    """(ok, reason). x: [T, K], weight: [E, N, K], counts: [E]."""
    return npu_supports(("npu_grouped_matmul", "npu_grouped_matmul_add_"), HALF, x, weight)


def _rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """The operator takes weight as [E, K, N]; a transposed view is read in place."""
    (y,) = torch.ops.npu.npu_grouped_matmul(
        [x.contiguous()],
        [weight.transpose(1, 2)],
        group_list=ends,
        split_item=_ONE_TENSOR,
        group_type=_BY_ROWS,
        group_list_type=_RUNNING_SUM,
    )
    return zero_tail(y, ends)


def _weights(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    """The operator adds to a float32 tensor, so the sum is rounded once."""
    total = torch.zeros(ends.shape[0], grad.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
    torch.ops.npu.npu_grouped_matmul_add_(
        total,
        grad.contiguous(),
        x.contiguous(),
        ends,
        transpose_x=True,
        transpose_weight=False,
        group_type=_BY_DEPTH,
        group_list_type=_RUNNING_SUM,
    )
    return total.to(x.dtype)


backend = Backend("npu", supports, differentiable(Products(_rows, _weights)))
