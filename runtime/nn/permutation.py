"""Token copies sorted by expert, and back. Both directions, and both gradients, are gathers: deterministic."""

import torch
from torch import Tensor


def expert_order(index_TK: Tensor, experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """(order, inverse, counts) of the T*K token copies. order [T*K]: which copy stands at each sorted place;
    inverse: where each copy went; counts [E] int64: copies of each expert. Copy t*K + k is token t's k-th."""
    flat = index_TK.flatten()
    order = torch.argsort(flat, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return order, inverse, torch.bincount(flat, minlength=experts)


class _Permute(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, order, inverse, copies):
        ctx.save_for_backward(inverse)
        ctx.copies = copies
        return x[order // copies if copies > 1 else order]

    @staticmethod
    def backward(ctx, grad):
        (inverse,) = ctx.saved_tensors
        grad = grad[inverse]
        if ctx.copies > 1:
            grad = grad.unflatten(0, (-1, ctx.copies)).sum(1)
        return grad, None, None, None


def permute(x_TH: Tensor, order: Tensor, inverse: Tensor, copies: int) -> Tensor:
    """Row i of the result is the token of copy order[i].  [T, H] -> [T*copies, H]."""
    return _Permute.apply(x_TH, order, inverse, copies)


def combine(y: Tensor, order: Tensor, inverse: Tensor, weights_TK: Tensor) -> Tensor:
    """The sorted copies' results back in token order, weighted and summed.  [T*K, H] -> [T, H]."""
    copies = _Permute.apply(y, inverse, order, 1).unflatten(0, weights_TK.shape)
    return (copies * weights_TK.to(y.dtype).unsqueeze(-1)).sum(1)
