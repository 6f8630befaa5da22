"""rms_norm in Triton, one source for NVIDIA and Ascend. Importing this module imports Triton.

Rows are read in blocks of columns, once for the sum and once for the result, so that any width fits on chip.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton types a kernel by its definition, which is not how a launch passes constants and options.

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from dayzero.kernels.devices import programs, rows

BLOCK = 2048  # columns at a time
TILE_ROWS, TILE_COLUMNS = 16, 128  # of the weight gradient
CHUNK = 64  # rows that one partial sum of the weight gradient covers


@triton.jit
def rms_norm_forward(
    x, weight, out, rstd, height, width, x_stride, eps, offset,
    HAS_WEIGHT: tl.constexpr, AFTER_CAST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """x: [height, width] with a row stride, weight: [width]; out: as x, contiguous; rstd: [height] float32."""
    for item in range(tl.program_id(0), height, tl.num_programs(0)):
        row = tl.cast(item, tl.int64)
        squares = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            v = tl.load(x + row * x_stride + column, mask=column < width, other=0.0).to(tl.float32)
            squares += v * v
        r = tl.rsqrt(tl.sum(squares, axis=0) / width + eps)
        tl.store(rstd + row, r)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            y = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32) * r
            if HAS_WEIGHT:
                if AFTER_CAST:
                    y = y.to(out.dtype.element_ty).to(tl.float32)
                y = y * (offset + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32))
            tl.store(out + row * width + column, y.to(out.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_backward(
    grad, x, weight, rstd, grad_x, height, width, grad_stride, x_stride, offset,
    HAS_WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """With n = x rstd and g = grad * (offset + weight): grad_x = rstd * (g - n * mean(g n))."""
    for item in range(tl.program_id(0), height, tl.num_programs(0)):
        row = tl.cast(item, tl.int64)
        r = tl.load(rstd + row)
        products = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            g = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
            if HAS_WEIGHT:
                g = g * (offset + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32))
            products += g * tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32) * r
        mean = tl.sum(products, axis=0) / width
        for start in range(0, width, BLOCK):
            column = start + tl.arange(0, BLOCK)
            inside = column < width
            g = tl.load(grad + row * grad_stride + column, mask=inside, other=0.0).to(tl.float32)
            if HAS_WEIGHT:
                g = g * (offset + tl.load(weight + column, mask=inside, other=0.0).to(tl.float32))
            n = tl.load(x + row * x_stride + column, mask=inside, other=0.0).to(tl.float32) * r
            tl.store(grad_x + row * width + column, (r * (g - n * mean)).to(grad_x.dtype.element_ty), mask=inside)


@triton.jit
def rms_norm_weight_backward(
    grad, x, rstd, partial, height, width, grad_stride, x_stride,
    AFTER_CAST: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """partial: [cdiv(height, CHUNK), width] float32, the sum of grad * n over CHUNK rows each."""
    blocks = tl.cdiv(width, COLUMNS)
    for item in range(tl.program_id(0), tl.cdiv(height, CHUNK) * blocks, tl.num_programs(0)):
        chunk = tl.cast(item // blocks, tl.int64)
        column = item % blocks * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros([COLUMNS], dtype=tl.float32)
        for start in range(0, CHUNK, ROWS):
            row = chunk * CHUNK + start + tl.arange(0, ROWS)
            inside = (row < height)[:, None] & (column < width)[None, :]
            r = tl.load(rstd + row, mask=row < height, other=0.0)
            v = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0)
            dy = tl.load(grad + row[:, None] * grad_stride + column[None, :], mask=inside, other=0.0)
            n = v.to(tl.float32) * r[:, None]
            if AFTER_CAST:
                n = n.to(x.dtype.element_ty).to(tl.float32)
            total += tl.sum(dy.to(tl.float32) * n, axis=0)
        tl.store(partial + chunk * width + column, total, mask=column < width)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor | None, eps: float, offset: float, after_cast: bool) -> Tensor:
        flat = rows(x)
        scale = None if weight is None else weight.contiguous()
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        rstd = torch.empty(flat.shape[0], dtype=torch.float32, device=x.device)
        if out.numel():
            rms_norm_forward[_grid(flat)](
                flat, flat if scale is None else scale, out, rstd, *flat.shape, flat.stride(0), eps, offset,
                HAS_WEIGHT=scale is not None, AFTER_CAST=after_cast, BLOCK=_block(flat),
            )  # fmt: skip
        ctx.save_for_backward(x, scale, rstd)
        ctx.offset, ctx.after_cast = offset, after_cast
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        x, weight, rstd = ctx.saved_tensors
        dy, flat = rows(grad), rows(x)
        grad_x = _input_gradient(dy, flat, weight, rstd, ctx.offset).view(x.shape) if ctx.needs_input_grad[0] else None
        grad_weight = None
        if weight is not None and ctx.needs_input_grad[1]:
            grad_weight = _weight_gradient(dy, flat, rstd, ctx.after_cast).to(weight.dtype)
        return grad_x, grad_weight, None, None, None


def _input_gradient(grad: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, offset: float) -> Tensor:
    """grad, x: [R, H], rstd: [R]. Returns [R, H]."""
    grad_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        rms_norm_backward[_grid(x)](
            grad, x, x if weight is None else weight, rstd, grad_x, *x.shape, grad.stride(0), x.stride(0), offset,
            HAS_WEIGHT=weight is not None, BLOCK=_block(x),
        )  # fmt: skip
    return grad_x


def _weight_gradient(grad: Tensor, x: Tensor, rstd: Tensor, after_cast: bool) -> Tensor:
    """grad, x: [R, H], rstd: [R]. Returns [H] float32."""
    height, width = x.shape
    chunks = triton.cdiv(height, CHUNK)
    partial = torch.empty(chunks, width, dtype=torch.float32, device=x.device)
    if x.numel():
        grid = (min(chunks * triton.cdiv(width, TILE_COLUMNS), programs(x.device)),)
        rms_norm_weight_backward[grid](
            grad, x, rstd, partial, height, width, grad.stride(0), x.stride(0),
            AFTER_CAST=after_cast, CHUNK=CHUNK, ROWS=TILE_ROWS, COLUMNS=TILE_COLUMNS,
        )  # fmt: skip
    return partial.sum(0)


def _grid(x: Tensor) -> tuple[int]:
    return (min(x.shape[0], programs(x.device)),)


def _block(x: Tensor) -> int:
    return min(triton.next_power_of_2(x.shape[1]), BLOCK)


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, *, weight_after_cast: bool = True
) -> Tensor:
    """x: [..., H], weight: [H] or None; float32, bfloat16 or float16. Returns [..., H] in x.dtype."""
    return _RMSNorm.apply(x, weight, eps, offset, weight_after_cast)
