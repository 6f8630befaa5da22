"""The meaning of grouped_gemm in plain PyTorch: one matrix product per expert."""

import torch
import torch.nn.functional as F
from torch import Tensor


def check(x: Tensor, weight: Tensor, counts: Tensor) -> None:
    """Raises ValueError unless x [T, K], weight [E, N, K], counts [E] int64 fit together. Does not read counts."""
    if x.dim() != 2 or weight.dim() != 3 or x.shape[1] != weight.shape[2]:
        found = f"x {list(x.shape)}, weight {list(weight.shape)}"
        raise ValueError(f"grouped_gemm: found {found}, expected x [T, K], weight [E, N, K]")
    if 0 in weight.shape:
        raise ValueError(f"grouped_gemm: weight is {list(weight.shape)}, expected no empty dimension")
    if x.dtype != weight.dtype or not x.is_floating_point():
        raise ValueError(f"grouped_gemm: x is {x.dtype}, weight {weight.dtype}, expected one floating dtype")
    if counts.shape != weight.shape[:1] or counts.dtype != torch.int64:
        found = f"{list(counts.shape)} {counts.dtype}"
        raise ValueError(f"grouped_gemm: counts is {found}, expected [{weight.shape[0]}] torch.int64")
    if not x.device == weight.device == counts.device:
        found = f"x on {x.device}, weight on {weight.device}, counts on {counts.device}"
        raise ValueError(f"grouped_gemm: {found}, expected one device")


def grouped_gemm(x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """x: [T, K], weight: [E, N, K], counts: [E]. Returns [T, N]. Raises ValueError if sum(counts) > T.

    split and unbind, not x[a:b] and weight[e]: the gradient of an index is a zero-filled tensor as large as its source.
    """
    rows: list[int] = counts.tolist()
    rest = x.shape[0] - sum(rows)
    if rest < 0 or min(rows) < 0:
        raise ValueError(f"grouped_gemm: counts {rows} do not fit x with {x.shape[0]} rows")
    parts = x.split([*rows, rest])
    products = [F.linear(part, matrix) for part, matrix in zip(parts, weight.unbind(0), strict=False)]
    return torch.cat([*products, x.new_zeros(rest, weight.shape[1])])
