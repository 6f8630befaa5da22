"""A router's product of which only the selected rows count: gradients that cost the experts chosen, not all of them."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

_WITH_BAGS = ("cpu", "cuda")  # devices on which torch adds rows up by index without atomic operations


def selected_product(x: Tensor, weight: Tensor, product: Tensor, index: Tensor) -> Tensor:
    """product.gather(-1, index), with the gradients that it has as a function of x and weight.

    x: [T, H], weight: [E, H], product: x weight^T [T, E], made without gradients, index: [T, K] int64 -> [T, K].
    The gradient of x is a sum of K rows of weight, the gradient of weight one of the rows of x that selected it, where
    the gradient of the whole product takes E rows for each token: for 896 experts, two dense products in float32.
    """
    return _SelectedProduct.apply(x, weight, product, index)  # type: ignore[no-any-return]


class _SelectedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, product: Tensor, index: Tensor) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None, index)
        ctx.rows = weight.shape[0]
        return product.gather(-1, index)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, index = ctx.saved_tensors
        if grad.device.type not in _WITH_BAGS:
            spread = grad.new_zeros(index.shape[0], ctx.rows).scatter_add_(-1, index, grad)
            return spread @ weight if weight is not None else None, spread.T @ x if x is not None else None, None, None
        grad_x = F.embedding_bag(index, weight, per_sample_weights=grad, mode="sum") if weight is not None else None
        return grad_x, None if x is None else _rows_of_each(grad, x, index, ctx.rows), None, None


def _rows_of_each(grad: Tensor, x: Tensor, index: Tensor, rows: int) -> Tensor:
    """[E, H]: of each row of weight, the sum of grad times x over the tokens that selected it."""
    chosen, order = index.flatten().sort(stable=True)
    first = torch.searchsorted(chosen, torch.arange(rows, device=index.device))
    tokens = order // index.shape[1]
    return F.embedding_bag(tokens, x, first, per_sample_weights=grad.flatten()[order], mode="sum")
