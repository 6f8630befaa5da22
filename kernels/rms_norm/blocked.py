"""rms_norm on a CPU in blocks of rows, keeping nothing but x and weight for the backward pass."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dayzero.kernels.blocks import blocks, supports
from dayzero.kernels.registry import Backend
from dayzero.kernels.rms_norm import reference


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, eps: float, offset: float, after_cast: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.offset, ctx.after_cast = eps, offset, after_cast
        out = torch.empty(x.shape, dtype=x.dtype)
        for o, part in blocks(out, x):
            o.copy_(reference.rms_norm(part.contiguous(), weight, eps, offset, weight_after_cast=after_cast))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        """With n = x rstd and g = grad * (offset + weight): grad_x = rstd * (g - n * mean(g n))."""
        x, weight = ctx.saved_tensors
        wide = torch.promote_types(x.dtype, torch.float32)
        needs_x, needs_weight = ctx.needs_input_grad[0], weight is not None and ctx.needs_input_grad[1]
        scale = None if weight is None else ctx.offset + weight.to(wide)
        grad_x = torch.empty(x.shape, dtype=x.dtype) if needs_x else None
        total = torch.zeros(x.shape[-1], dtype=wide) if needs_weight else None
        for dx, dy, part in blocks(grad if grad_x is None else grad_x, grad, x):
            dy, part = dy.contiguous().to(wide), part.contiguous().to(wide)
            rstd = torch.rsqrt(part.pow(2).mean(-1, keepdim=True).add_(ctx.eps))
            n = part * rstd
            if total is not None:
                total += (dy * (n.to(x.dtype).to(wide) if ctx.after_cast else n)).sum(0)
            if grad_x is not None:
                g = dy if scale is None else dy * scale
                dx.copy_((g - n * (g * n).mean(-1, keepdim=True)).mul_(rstd))
        return grad_x, total if weight is None or total is None else total.to(weight.dtype), None, None, None


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, *, weight_after_cast: bool = True
) -> Tensor:
    """x: [..., H] on a CPU, weight: [H] or None. Returns [..., H] in x.dtype, the reference's bits."""
    return _RMSNorm.apply(x, weight, eps, offset, weight_after_cast)  # type: ignore[no-any-return]


backend = Backend("blocked", lambda x, weight, *_, **__: supports(x, *([] if weight is None else [weight])), rms_norm)
