"""grouped_gemm in Triton, one source for NVIDIA and Ascend. Importing this module imports Triton.

The counts stay on the device: a table made there tells each program which expert and rows its tile belongs to.
"""

# pyright: reportCallIssue=false, reportArgumentType=false
# Triton types a kernel by its definition, which is not how a launch passes constants and options.

import torch
import triton
import triton.language as tl
from torch import Tensor

from dayzero.kernels.devices import programs
from dayzero.kernels.grouped_gemm.autograd import Products, check_ends, differentiable

TILE_N, TILE_T = 128, 64
SMALLEST, LARGEST = 16, 128  # rows of a tile; the largest needs 8 warps to stay in registers


@triton.jit
def grouped_rows(
    x, weight, out, table, tiles, experts, width_n, width_k, x_stride,
    weight_stride_e, weight_stride_n, weight_stride_k,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """out[rows of a tile] = x[rows] @ weight[expert].T; zero for the tile past the last expert.

    x: [T, K] with a row stride; weight: [E, N, K]; out: [T, N]; table: [tiles, 3] int32 of expert, first row, end.
    """
    blocks_n = tl.cdiv(width_n, TILE_N)
    for item in range(tl.program_id(0), tiles * blocks_n, tl.num_programs(0)):
        entry = table + item // blocks_n * 3
        expert = tl.load(entry)
        first = tl.load(entry + 1)
        height = tl.load(entry + 2) - first
        depth = tl.where(expert < experts, width_k, 0)
        m = tl.arange(0, TILE_M)
        n = item % blocks_n * TILE_N + tl.arange(0, TILE_N)
        x_tile = x + first.to(tl.int64) * x_stride
        weight_tile = weight + expert.to(tl.int64) * weight_stride_e
        total = tl.zeros([TILE_M, TILE_N], dtype=tl.float32)
        for start in range(0, depth, TILE_K):
            k = start + tl.arange(0, TILE_K)
            a = tl.load(
                x_tile + m[:, None] * x_stride + k[None, :],
                mask=(m < height)[:, None] & (k < width_k)[None, :], other=0.0,
            )  # fmt: skip
            b = tl.load(
                weight_tile + k[:, None] * weight_stride_k + n[None, :] * weight_stride_n,
                mask=(k < width_k)[:, None] & (n < width_n)[None, :], other=0.0,
            )  # fmt: skip
            total += tl.dot(a, b, input_precision="ieee")
        out_tile = out + first.to(tl.int64) * width_n
        inside = (m < height)[:, None] & (n < width_n)[None, :]
        tl.store(out_tile + m[:, None] * width_n + n[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def grouped_weights(
    grad, x, out, bounds, experts, width_n, width_k, grad_stride, x_stride,
    TILE_T: tl.constexpr, TILE_N: tl.constexpr, TILE_K: tl.constexpr,
):  # fmt: skip
    """out[e] = grad[rows of e].T @ x[rows of e]. grad: [T, N]; x: [T, K]; out: [E, N, K]; bounds: [E + 1] int32."""
    blocks_n = tl.cdiv(width_n, TILE_N)
    blocks_k = tl.cdiv(width_k, TILE_K)
    for item in range(tl.program_id(0), experts * blocks_n * blocks_k, tl.num_programs(0)):
        expert = item // (blocks_n * blocks_k)
        first = tl.load(bounds + expert)
        height = tl.load(bounds + expert + 1) - first
        n = item // blocks_k % blocks_n * TILE_N + tl.arange(0, TILE_N)
        k = item % blocks_k * TILE_K + tl.arange(0, TILE_K)
        grad_rows = grad + first.to(tl.int64) * grad_stride
        x_rows = x + first.to(tl.int64) * x_stride
        total = tl.zeros([TILE_N, TILE_K], dtype=tl.float32)
        for start in range(0, height, TILE_T):
            t = start + tl.arange(0, TILE_T)
            a = tl.load(
                grad_rows + t[:, None] * grad_stride + n[None, :],
                mask=(t < height)[:, None] & (n < width_n)[None, :], other=0.0,
            )  # fmt: skip
            b = tl.load(
                x_rows + t[:, None] * x_stride + k[None, :],
                mask=(t < height)[:, None] & (k < width_k)[None, :], other=0.0,
            )  # fmt: skip
            total += tl.dot(tl.trans(a), b, input_precision="ieee")
        out_matrix = out + tl.cast(expert, tl.int64) * width_n * width_k
        inside = (n < width_n)[:, None] & (k < width_k)[None, :]
        tl.store(out_matrix + n[:, None] * width_k + k[None, :], total.to(out.dtype.element_ty), mask=inside)


def tile_table(ends: Tensor, height: int, tile: int) -> Tensor:
    """Tiles of at most `tile` rows that cover 0..height, none across two experts: [tiles, 3] int32.

    ends: [E] int64. Each entry is expert, first row, end row. Rows past ends[-1] belong to expert E. The number of
    tiles is an upper bound that needs no count on the host; entries left over are empty.
    """
    stops = torch.cat([ends, ends.new_tensor([height, height])])  # experts, the tail, tiles left over
    starts = torch.cat([ends.new_zeros(1), stops[:-1]])
    tiles = (stops - starts + tile - 1) // tile
    last = tiles.cumsum(0)
    index = torch.arange(height // tile + ends.shape[0] + 1, device=ends.device)
    group = (index[:, None] >= last[None, :-1]).sum(1)
    first = starts[group] + (index - (last - tiles)[group]) * tile
    end = torch.minimum(first + tile, stops[group])
    return torch.stack([group, torch.minimum(first, end), end], 1).int()


def _rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    check_ends(ends, x.shape[0])
    x = x if x.stride(1) == 1 else x.contiguous()
    experts, width_n, width_k = weight.shape
    mean = triton.next_power_of_2(triton.cdiv(x.shape[0], experts))
    tile = min(max(mean, SMALLEST), LARGEST)
    table = tile_table(ends, x.shape[0], tile)
    out = torch.empty(x.shape[0], width_n, dtype=x.dtype, device=x.device)
    grid = (min(table.shape[0] * triton.cdiv(width_n, TILE_N), programs(x.device, matrix=True)),)
    grouped_rows[grid](
        x, weight, out, table, table.shape[0], experts, width_n, width_k, x.stride(0), *weight.stride(),
        TILE_M=tile, TILE_N=TILE_N, TILE_K=_line(x), num_warps=8 if tile == LARGEST else 4,
    )  # fmt: skip
    return out


def _weights(grad: Tensor, x: Tensor, ends: Tensor) -> Tensor:
    grad, x = (t if t.stride(1) == 1 else t.contiguous() for t in (grad, x))
    experts, width_n, width_k = ends.shape[0], grad.shape[1], x.shape[1]
    bounds = torch.cat([ends.new_zeros(1), ends]).int()
    out = torch.empty(experts, width_n, width_k, dtype=x.dtype, device=x.device)
    items = experts * triton.cdiv(width_n, TILE_N) * triton.cdiv(width_k, 2 * _line(x))
    grouped_weights[(min(items, programs(x.device, matrix=True)),)](
        grad, x, out, bounds, experts, width_n, width_k, grad.stride(0), x.stride(0),
        TILE_T=TILE_T, TILE_N=TILE_N, TILE_K=2 * _line(x), num_warps=8,
    )  # fmt: skip
    return out


def _line(x: Tensor) -> int:
    """Elements in 128 bytes of a row."""
    return 128 // x.element_size()


grouped_gemm = differentiable(Products(_rows, _weights))
