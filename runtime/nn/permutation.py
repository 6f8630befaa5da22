"""Copies of tokens sorted by expert, and their results summed back in the tokens' order."""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_BLOCK = 1 << 15  # numbers
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
    weights = weights_TK.flatten().index_select(0, copies.place).to(x.dtype)
    y = compute(rows * weights.unsqueeze(-1) if weigh == "input" else rows, copies.counts)
    if norm is not None:
        y = norm(y)
    return collect(y, copies.row, x.shape[0], None if weigh == "input" else weights)


def spread(x: Tensor, row: Tensor) -> Tensor:
    """x[row].  [T, H], [M] -> [M, H]. The gradient is `collect`."""
    return _Spread.apply(x, row)


def collect(y: Tensor, row: Tensor, tokens: int, weights: Tensor | None = None) -> Tensor:
    """[T, H]: the sum of the y [M, H] of each token, `row` [M] saying whose they are, each times its `weights` [M].

    Products and sums are float32 at least, and rounded once.
    """
    return _Collect.apply(y, row, tokens, weights)


class _Spread(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, row):
        ctx.save_for_backward(row)
        ctx.tokens = x.shape[0]
        return x.index_select(0, row)

    @staticmethod
    def backward(ctx, grad):
        (row,) = ctx.saved_tensors
        return _sums(grad, row, ctx.tokens, None), None


class _Collect(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y, row, tokens, weights):
        ctx.save_for_backward(row, weights, y if ctx.needs_input_grad[3] else None)
        return _sums(y, row, tokens, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        row, weights, y = ctx.saved_tensors
        if weights is None:
            return grad.index_select(0, row), None, None, None
        grad_y = grad.new_empty(row.shape[0], *grad.shape[1:]) if ctx.needs_input_grad[0] else None
        grad_weights = torch.empty_like(weights) if y is not None else None
        for part in _blocks(row.shape[0], grad):
            of_tokens = _wide(grad.index_select(0, row[part]))
            if y is not None and grad_weights is not None:
                grad_weights[part] = (of_tokens * y[part]).sum(-1)
            if grad_y is not None:
                grad_y[part] = of_tokens * weights[part].unsqueeze(-1)
        return grad_y, None, None, grad_weights


def _sums(y: Tensor, row: Tensor, tokens: int, weights: Tensor | None) -> Tensor:
    wide = torch.promote_types(y.dtype, torch.float32)
    total = torch.zeros(tokens, *y.shape[1:], dtype=wide, device=y.device)
    for part in _blocks(row.shape[0], y):
        added = _wide(y[part])
        if weights is not None:
            added = added * weights[part].unsqueeze(-1)
        total.index_add_(0, row[part], added)
    return total.to(y.dtype)


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _blocks(height: int, like: Tensor) -> Iterator[slice]:
    """Of so many rows like those of a tensor: on a CPU so few that they stay in its cache in float32."""
    step = max(1, _BLOCK // max(1, like.shape[-1])) if like.device.type == "cpu" else max(1, height)
    yield from (slice(first, first + step) for first in range(0, height, step))
