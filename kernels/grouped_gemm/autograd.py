"""The derivative of a grouped product in terms of two grouped products, shared by all backends."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Products(NamedTuple):
    """What a backend supplies. ends: [E] int64, the running sum of counts.

    rows(x [T, K], weight [E, N, K] of any strides, ends) -> [T, N], rows past ends[-1] zero.
    weights(grad [T, N], x [T, K], ends) -> [E, N, K], the sum over each expert's rows of grad^T x.
    """

    rows: Callable[[Tensor, Tensor, Tensor], Tensor]
    weights: Callable[[Tensor, Tensor, Tensor], Tensor]


class _GroupedGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, counts: Tensor, products: Products) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ends = counts.cumsum(0)
        # A frozen weight needs no input kept, an input without gradient no weight.
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, ends)
        ctx.products = products
        ctx.weight_shape = weight.shape
        return products.rows(x, weight, ends) if x.shape[0] else x.new_empty(0, weight.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, ends = ctx.saved_tensors
        if grad.shape[0] == 0:
            grad_x = grad.new_empty(0, ctx.weight_shape[2]) if weight is not None else None
            return grad_x, grad.new_zeros(ctx.weight_shape) if x is not None else None, None, None
        grad_x = ctx.products.rows(grad, weight.transpose(1, 2), ends) if weight is not None else None
        grad_weight = ctx.products.weights(grad, x, ends) if x is not None else None
        return grad_x, grad_weight, None, None


def differentiable(products: Products) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """grouped_gemm(x, weight, counts) with gradients, from a backend's two products."""

    def grouped_gemm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        return _GroupedGemm.apply(x, weight, counts, products)

    return grouped_gemm


def check_ends(ends: Tensor, height: int) -> None:
    """Fail if counts ask for more than `height` rows: ValueError on a host, on a device at the next synchronisation."""
    message = f"grouped_gemm: sum(counts) exceeds the {height} rows of x"
    if not _readable(ends):
        torch.ops.aten._assert_async.msg(ends[-1] <= height, message)
    elif int(ends[-1]) > height:
        raise ValueError(message)


def zero_tail(y: Tensor, ends: Tensor) -> Tensor:
    """y: [T, N], its rows past ends[-1] set to zero in place: grouped kernels leave them uninitialised."""
    if _readable(ends):
        y[int(ends[-1]) :] = 0
        return y
    tail = torch.arange(y.shape[0], device=y.device) >= ends[-1]
    return y.masked_fill_(tail[:, None], 0)


def _readable(ends: Tensor) -> bool:
    """Whether reading a value waits for no device; a fake tensor has none."""
    return ends.device.type == "cpu" and type(ends) is Tensor
