"""grouped_gemm in bfloat16 on a CPU: one product per expert, its rows rounded up to few different heights.

oneDNN compiles a kernel for every shape, which takes as long as a product of some hundred rows, and keeps about a
thousand. Experts get other numbers of rows in every step, so nearly every product would be compiled anew.
Rows beyond an expert's own are the next expert's, whose product comes later and overwrites what came of them.
"""

import torch
from torch import Tensor

from dayzero.kernels.devices import plain
from dayzero.kernels.grouped_gemm.autograd import Products, check_ends, differentiable
from dayzero.kernels.registry import Backend


def supports(x: Tensor, weight: Tensor, counts: Tensor) -> tuple[bool, str]:
    """(ok, reason). x: [T, K], weight: [E, N, K], counts: [E]."""
    if x.device.type != "cpu":
        return False, f"oneDNN is for a CPU, not for {x.device.type}"
    return plain((torch.bfloat16,), x, weight)


def height(rows: int) -> int:
    """rows, rounded up to one of a few heights to an octave."""
    step = max(16, 1 << max(0, rows.bit_length() - 5))
    return -(-rows // step) * step


def _rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    check_ends(ends, x.shape[0])
    y = x.new_empty(x.shape[0], weight.shape[1])
    start = end = 0
    for end, matrix in zip(ends.tolist(), weight.unbind(0), strict=True):
        if end > start:
            stop = start + height(end - start)
            torch.mm(x[start:stop], matrix.t(), out=y[start:stop])
        start = end
    y[end:] = 0
    return y


def _weights(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    out = x.new_empty(ends.shape[0], grad.shape[1], x.shape[1])
    start = 0
    for end, product in zip(ends.tolist(), out.unbind(0), strict=True):
        torch.mm(_padded(grad[start:end]).t(), _padded(x[start:end]), out=product)
        start = end
    return out


def _padded(part: Tensor) -> Tensor:
    """[M, N] with rows of zeros up to their `height`."""
    wanted = height(part.shape[0])
    if wanted == part.shape[0]:
        return part
    whole = part.new_zeros(wanted, part.shape[1])
    whole[: part.shape[0]] = part
    return whole


backend = Backend("bucketed", supports, differentiable(Products(_rows, _weights)))
