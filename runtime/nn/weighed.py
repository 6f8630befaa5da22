"""An activation times a weight for each row, of which neither is kept for the backward pass."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def weighed(act: Callable[[Tensor], Tensor], inner: Tensor, weights: Tensor) -> Tensor:
    """act(inner) * weights.  inner: [M, N], weights: [M], act: of each row by itself, without parameters -> [M, F].

    A sum of experts weighs what they give; a linear projection behind the activation may as well be given the weighed
    activation, which is narrower, and the projection's result is then not needed for the gradient of the weights.
    """
    return _Weighed.apply(inner, weights, act)  # type: ignore[no-any-return]


class _Weighed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inner: Tensor, weights: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(inner, weights)
        ctx.act = act
        return act(inner) * weights.unsqueeze(-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inner, weights = ctx.saved_tensors
        inner = inner.detach().requires_grad_(ctx.needs_input_grad[0])
        with torch.enable_grad():
            value = ctx.act(inner)
        grad_weights = None
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(grad.dtype, torch.float32)
            grad_weights = (grad * value.detach()).sum(-1, dtype=wide).to(weights.dtype)
        grad_inner = None
        if ctx.needs_input_grad[0]:
            (grad_inner,) = torch.autograd.grad(value, inner, grad * weights.unsqueeze(-1))
        return grad_inner, grad_weights, None
