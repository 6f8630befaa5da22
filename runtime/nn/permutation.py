"""Copies of tokens sorted by expert, and their results summed back in the tokens' order."""

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Weigh = Literal["output", "input"]
Compute = Callable[[Tensor, Tensor], Tensor]


class Copies(NamedTuple):
    """M copies sorted by expert. place [M]: which of the T*K entries of `index` each is; row [M]: of which token;
    counts [E] int64: how many each expert has."""

    place: Tensor
    row: Tensor
    counts: Tensor


def sorted_copies(index_TK: Tensor, experts: int, total: int | None = None) -> Copies:
    """Copies for the experts 0..E-1; entries of E and more are for none. total: M where the host knows it; otherwise
    it is counted if some entry may be for none, which waits for the device."""
    flat = index_TK.flatten()
    place = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts)[:experts]
    place = place[: int(counts.sum()) if total is None else total]
    return Copies(place, place // max(1, index_TK.shape[1]), counts)


def through_experts(
    compute: Compute,
    x: Tensor,
    weights_TK: Tensor,
    copies: Copies,
    weigh: Weigh = "output",
    norm: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """sum_k w_k norm(E_k x), or of E_k(w_k x) where weigh is "input".  [T, H] -> [T, H].

    compute(rows [M, H], counts [E]) -> [M, H] is what the experts do to rows sorted by expert.
    """
    rows = spread(x, copies.row)
    weights = weights_TK.flatten().index_select(0, copies.place).to(x.dtype).unsqueeze(-1)
    y = compute(rows * weights if weigh == "input" else rows, copies.counts)
    if norm is not None:
        y = norm(y)
    return collect(y if weigh == "input" else y * weights, copies.row, x.shape[0])


def spread(x: Tensor, row: Tensor) -> Tensor:
    """x[row].  [T, H], [M] -> [M, H]. The gradient is `collect`."""
    return _Spread.apply(x, row)


def collect(y: Tensor, row: Tensor, tokens: int) -> Tensor:
    """[T, H]: the sum of the y [M, H] of each token, `row` [M] saying whose they are; summed in float32 at least."""
    return _Collect.apply(y, row, tokens)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, row):
        ctx.save_for_backward(row)
        ctx.tokens = x.shape[0]
        return x.index_select(0, row)

    @staticmethod
    def backward(ctx, grad):
        (row,) = ctx.saved_tensors
        return _sums(grad, row, ctx.tokens), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, row, tokens):
        ctx.save_for_backward(row)
        return _sums(y, row, tokens)

    @staticmethod
    def backward(ctx, grad):
        (row,) = ctx.saved_tensors
        return grad.index_select(0, row), None, None


def _sums(y: Tensor, row: Tensor, tokens: int) -> Tensor:
    wide = torch.promote_types(y.dtype, torch.float32)
    total = torch.zeros(tokens, *y.shape[1:], dtype=wide, device=y.device)
    return total.index_add_(0, row, y.to(wide)).to(y.dtype)
