"""Which rows go to which rank, and what a row says: a token once for each rank that holds some of its experts.

A row is [x, weights, slots], H + 2K wide, in x's dtype: the token, the weight of each of its K choices, and at which of
the receiver's experts each choice is aimed, as integers of that width. One message carries what to compute and where.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

_INTEGER = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # of the same bytes as a floating-point number


class Rows(NamedTuple):
    """token [N]: which token each row is, by rank and then in order; rank [N]: where it goes; height: rows in all,
    those beyond N being empty."""

    token: Tensor
    rank: Tensor
    height: int


def rows_by_rank(slot_TK: Tensor, slots: int, ranks: int) -> Rows:
    """A row for each token and rank that the token has a slot on. slot: 0..ranks*slots - 1, or more for none."""
    rank = (slot_TK // slots).clamp(max=ranks)
    goes = torch.zeros(slot_TK.shape[0], ranks + 1, dtype=torch.bool, device=slot_TK.device)
    goes.scatter_(1, rank, True)
    rank, token = goes[:, :ranks].t().nonzero(as_tuple=True)
    return Rows(token, rank, token.shape[0])


def every_row(slot_TK: Tensor, height: int) -> Rows:
    """Each token once, as all ranks get it, and empty rows up to `height`."""
    token = torch.arange(slot_TK.shape[0], device=slot_TK.device)
    return Rows(token, torch.zeros_like(token), height)


def local_slots(slot: Tensor, rank: Tensor | int, slots: int) -> Tensor:
    """slot [N, K] over all ranks -> the slot on `rank`, or `slots` where it is on another."""
    rank = rank.unsqueeze(1) if isinstance(rank, Tensor) else rank
    return torch.where(slot // slots == rank, slot % slots, slots)


def pack(x: Tensor, weights_TK: Tensor, slot_NK: Tensor, rows: Rows) -> Tensor:
    """[height, H + 2K]. x: [T, H]; weights in x's dtype; slot_NK: of each row; empty rows have slots of -1."""
    return _Pack.apply(x, weights_TK, slot_NK, rows)


def unpack(rows: Tensor, choices: int) -> tuple[Tensor, Tensor, Tensor]:
    """rows [N, H + 2K] -> x [N, H], weights [N, K], slot [N, K] int64."""
    x, weights = _Unpack.apply(rows, choices)
    slot = rows.detach().view(_INTEGER[rows.element_size()])[:, -choices:].long()
    return x, weights, slot


class _Pack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weights, slot, rows):
        (tokens, hidden), choices = x.shape, weights.shape[1]
        ctx.rows, ctx.shape = rows, (tokens, hidden, choices)
        count = rows.token.shape[0]
        out = x.new_empty(rows.height, hidden + 2 * choices)
        out[:count, :hidden] = x.index_select(0, rows.token)
        out[:count, hidden:-choices] = weights.index_select(0, rows.token)
        out[count:, :-choices] = 0
        integers = out.view(_INTEGER[out.element_size()])[:, -choices:]
        integers[:count] = slot.to(integers.dtype)
        integers[count:] = -1
        return out

    @staticmethod
    def backward(ctx, grad):
        tokens, hidden, choices = ctx.shape
        token = ctx.rows.token
        grad = grad[: token.shape[0]]
        wide = torch.promote_types(grad.dtype, torch.float32)
        total = torch.zeros(tokens, hidden + choices, dtype=wide, device=grad.device)
        total.index_add_(0, token, grad[:, :-choices].to(wide))
        return *(part.to(grad.dtype) for part in total.split((hidden, choices), 1)), None, None


class _Unpack(torch.autograd.Function):
    @staticmethod
    def forward(ctx, rows, choices):
        ctx.choices = choices
        hidden = rows.shape[1] - 2 * choices
        return rows[:, :hidden], rows[:, hidden:-choices]

    @staticmethod
    def backward(ctx, grad_x, grad_weights):
        return F.pad(torch.cat((grad_x, grad_weights), 1), (0, ctx.choices)), None
