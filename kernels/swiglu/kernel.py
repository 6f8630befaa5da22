"""swiglu in Triton, one source for NVIDIA and Ascend. Importing this module imports Triton."""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton types a kernel by its definition, which is not how a launch passes constants and options.

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from dayzero.kernels.devices import programs, rows

BLOCK = 1024


@triton.jit
def swiglu_forward(
    gate, up, out, limit, height, width, gate_stride, up_stride, CLAMP: tl.constexpr, BLOCK: tl.constexpr
):
    """gate, up: [height, width] with row strides; out: the same, contiguous. One item is BLOCK columns of a row."""
    blocks = tl.cdiv(width, BLOCK)
    for item in range(tl.program_id(0), height * blocks, tl.num_programs(0)):
        row = tl.cast(item // blocks, tl.int64)
        column = item % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        if CLAMP:  # tl.where, not tl.minimum: NaN must stay NaN
            g = tl.where(g > limit, limit, g)
            u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        y = g * tl.sigmoid(g) * u
        tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def swiglu_backward(
    grad, gate, up, grad_gate, grad_up, limit, height, width, grad_stride, gate_stride, up_stride,
    CLAMP: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """grad, gate, up: [height, width] with row strides; grad_gate, grad_up: the same, contiguous."""
    blocks = tl.cdiv(width, BLOCK)
    for item in range(tl.program_id(0), height * blocks, tl.num_programs(0)):
        row = tl.cast(item // blocks, tl.int64)
        column = item % blocks * BLOCK + tl.arange(0, BLOCK)
        inside = column < width
        dy = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(gate + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        u = tl.load(up + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        gate_scale = dy
        up_scale = dy
        if CLAMP:  # a clamped input has no gradient; one at the limit has
            gate_scale = tl.where(g > limit, 0.0, dy)
            up_scale = tl.where((u > limit) | (u < -limit), 0.0, dy)
            g = tl.where(g > limit, limit, g)
            u = tl.where(u > limit, limit, tl.where(u < -limit, -limit, u))
        s = tl.sigmoid(g)
        dg = gate_scale * u * s * (1.0 + g * (1.0 - s))
        du = up_scale * g * s
        at = row * width + column
        tl.store(grad_gate + at, dg.to(grad_gate.dtype.element_ty), mask=inside)
        tl.store(grad_up + at, du.to(grad_up.dtype.element_ty), mask=inside)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor, limit: float | None) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.limit = limit
        out = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        if out.numel():
            g, u = rows(gate), rows(up)
            swiglu_forward[_grid(g)](
                g, u, out, limit or 0.0, *g.shape, g.stride(0), u.stride(0), CLAMP=limit is not None, BLOCK=BLOCK
            )
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        limit = ctx.limit
        grad_gate = torch.empty(gate.shape, dtype=gate.dtype, device=gate.device)
        grad_up = torch.empty_like(grad_gate)
        if grad.numel():
            dy, g, u = rows(grad), rows(gate), rows(up)
            swiglu_backward[_grid(g)](
                dy, g, u, grad_gate, grad_up, limit or 0.0, *g.shape, dy.stride(0), g.stride(0), u.stride(0),
                CLAMP=limit is not None, BLOCK=BLOCK,
            )  # fmt: skip
        return grad_gate, grad_up, None


def _grid(gate: Tensor) -> tuple[int]:
    height, width = gate.shape
    return (min(height * triton.cdiv(width, BLOCK), programs(gate.device)),)


def swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    """gate, up: [..., F], float32, bfloat16 or float16. Returns [..., F]."""
    return _SwiGLU.apply(gate, up, limit)
