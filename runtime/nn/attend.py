"""Softmax attention inside documents, the part without parameters: which tokens see which, and how scores become sums.

Scores are scale * q.k, then capped, then biased; a token attends to itself and to what precedes it in its own document
(`causal`), to the last `window` tokens of these, or to those in the same run of `chunk` positions.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from dayzero.runtime.rows import gather

from .cut import Cut, cut

# (first row, age [Q, K]) -> [N, Q, K]: added to the scores of the Q tokens from that row on, of keys that much older.
Bias = Callable[[int, Tensor], Tensor]

_shifted: ContextVar[bool] = ContextVar("shifted", default=False)


@contextmanager
def shifted_scores() -> Iterator[None]:
    """Inside, the largest score of each row is taken off first, as some references do.

    A softmax does not see it and nobody needs it, but where it saturates the last digits of gradients differ, and a
    proof looks at those.
    """
    token = _shifted.set(True)
    try:
        yield
    finally:
        _shifted.reset(token)


QUERIES = 1024  # queries whose scores exist at a time where a fused kernel cannot be used


@dataclass(frozen=True)
class Visibility:
    """Which tokens of its document a token attends to. window: counts the token itself. chunk: positions a run."""

    causal: bool = True
    window: int | None = None
    chunk: int | None = None


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: tuple[int, ...],
    scale: float,
    visible: Visibility | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    bias: Bias | None = None,
) -> Tensor:
    """query: [T, N, D]; key: [T, G, D]; value: [T, G, Dv]; lengths: of the documents. Returns [T, N, Dv].

    softcap: scores become softcap * tanh(scores / softcap). sinks: [N], or [T, N] for one a token: the logit of a key
    that everyone sees and whose value is 0, so that the weights of a token need not add up to 1 (Xiao et al. 2023,
    arXiv:2309.17453).
    """
    visible = visible or Visibility()
    if isinstance(lengths, Cut):
        return _across_ranks(query, key, value, lengths, scale, visible, softcap, sinks, bias)
    if visible.chunk is not None:
        lengths = tuple(part for length in lengths for part in _runs(length, visible.chunk))
        visible = replace(visible, chunk=None)
    plain = softcap is None and sinks is None and bias is None and not _shifted.get()
    if plain and lengths and len(set(lengths)) == 1:
        shape = (len(lengths), lengths[0])
        q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in (query, key, value))
        return _fused(q, k, v, scale, visible).transpose(1, 2).flatten(0, 1)
    parts = []
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        q, k, v = (part[rows].transpose(0, 1)[None] for part in (query, key, value))
        if plain and length:
            parts.append(_fused(q, k, v, scale, visible)[0].transpose(0, 1))
        elif length:
            sink = sinks[rows] if sinks is not None and sinks.ndim == 2 else sinks
            parts.append(_in_full(q[0], k[0], v[0], scale, visible, softcap, sink, bias, start))
        start += length
    return torch.cat(parts) if parts else query.new_zeros(*query.shape[:2], value.shape[-1])


def _across_ranks(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Cut,
    scale: float,
    visible: Visibility,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Bias | None,
) -> Tensor:
    """This rank's queries to the keys of all ranks, which are gathered unless they are there already."""
    key, value = (part if part.shape[0] == sum(lengths.whole) else gather(part, lengths.span) for part in (key, value))
    if visible.chunk is not None:
        lengths = cut([part for length in lengths.whole for part in _runs(length, visible.chunk)], lengths.span)
        visible = replace(visible, chunk=None)
    plain = softcap is None and sinks is None and bias is None
    parts, start = [], 0
    for piece in lengths.pieces:
        rows, document = slice(start, start + piece.length), slice(piece.start, piece.start + piece.whole)
        q, k, v = (part.transpose(0, 1) for part in (query[rows], key[document], value[document]))
        if plain:
            parts.append(_fused(q[None], k[None], v[None], scale, visible, piece.first)[0].transpose(0, 1))
        else:
            sink = sinks[rows] if sinks is not None and sinks.ndim == 2 else sinks
            parts.append(_in_full(q, k, v, scale, visible, softcap, sink, bias, start, piece.first))
        start += piece.length
    return torch.cat(parts)


def _runs(length: int, chunk: int) -> list[int]:
    return [chunk] * (length // chunk) + ([length % chunk] if length % chunk else [])


def _ages(first: int, queries: int, keys: range, device: torch.device) -> Tensor:
    """[Q, K]: by how many positions each key precedes each query."""
    at = torch.arange(first, first + queries, device=device)
    return at[:, None] - torch.arange(keys.start, keys.stop, device=device)


def visible_keys(age: Tensor, visible: Visibility) -> Tensor | None:
    """[Q, K] bool, None where every key is seen."""
    mask = age >= 0 if visible.causal else None
    if visible.window is not None:
        near = age < visible.window if visible.causal else age.abs() < visible.window
        mask = near if mask is None else mask & near
    return mask


def _keys_for(first: int, queries: int, length: int, visible: Visibility) -> range:
    """The keys that any of the queries may see."""
    stop = min(length, first + queries) if visible.causal else length
    start = 0 if visible.window is None or not visible.causal else max(0, first - visible.window + 1)
    return range(start, stop)


def _fused(query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Visibility, at: int = 0) -> Tensor:
    """query: [B, N, Q, D], the tokens from place `at` on; key: [B, G, S, D]; value: [B, G, S, Dv] -> [B, N, Q, Dv]."""
    length, width = key.shape[2], value.shape[-1]
    # Fused kernels want one size for all three; channels of zeros change neither scores nor sums.
    size = max(query.shape[-1], width)
    query, key, value = (F.pad(part, (0, size - part.shape[-1])) for part in (query, key, value))
    grouped = query.shape[1] != key.shape[1]
    if (visible.window is None or visible.window >= length) and query.shape[2] == length:
        out = F.scaled_dot_product_attention(
            query, key, value, is_causal=visible.causal, scale=scale, enable_gqa=grouped
        )
        return out[..., :width]
    parts = []
    for first in range(0, query.shape[2], QUERIES):
        part = query[:, :, first : first + QUERIES]
        keys = _keys_for(at + first, part.shape[2], length, visible)
        mask = visible_keys(_ages(at + first, part.shape[2], keys, query.device), visible)
        k, v = key[:, :, keys.start : keys.stop], value[:, :, keys.start : keys.stop]
        parts.append(F.scaled_dot_product_attention(part, k, v, attn_mask=mask, scale=scale, enable_gqa=grouped))
    return (torch.cat(parts, 2) if len(parts) > 1 else parts[0])[..., :width]


def _in_full(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    visible: Visibility,
    softcap: float | None,
    sinks: Tensor | None,
    bias: Bias | None,
    start: int,
    at: int = 0,
) -> Tensor:
    """One document with its scores written out. query: [N, Q, D], the tokens from place `at` on; key: [G, S, D]; value:
    [G, S, Dv]; start: the first query's row -> [Q, N, Dv]."""
    heads, length, _ = query.shape
    groups = key.shape[0]

    def some(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, first: int, keys: range) -> Tensor:
        count = query.shape[1]
        grouped = query.reshape(groups, heads // groups * count, -1)
        scores = (grouped @ key.transpose(1, 2) * scale).view(heads, count, -1)
        if softcap is not None:
            scores = torch.tanh(scores / softcap) * softcap
        age = _ages(at + first, count, keys, query.device)
        if bias is not None:
            scores = scores + bias(start + first, age)
        mask = visible_keys(age, visible)
        if mask is not None:
            scores = scores.masked_fill(~mask, float("-inf"))
        if sinks is not None:
            sink = sinks[:, None, None].expand(-1, count, 1) if sinks.ndim == 1 else sinks.t()[..., None]
            scores = torch.cat((scores, sink.to(scores.dtype)), -1)
        if _shifted.get():
            scores = scores - scores.max(-1, keepdim=True).values
        wide = torch.promote_types(scores.dtype, torch.float32)
        weights = scores.softmax(-1, dtype=wide).to(value.dtype)
        if sinks is not None:
            weights = weights[..., :-1]
        out = weights.reshape(groups, heads // groups * count, -1) @ value
        return out.view(heads, count, -1).transpose(0, 1)

    parts = []
    for first in range(0, length, QUERIES):
        rows = slice(first, first + QUERIES)
        part = query[:, rows]
        keys = _keys_for(at + first, part.shape[1], key.shape[1], visible)
        sink = sinks[rows] if sinks is not None and sinks.ndim == 2 else sinks
        arguments = (part, key[:, keys.start : keys.stop], value[:, keys.start : keys.stop], sink, first, keys)
        # The scores of a long document are made again for the backward pass rather than kept for every block of it.
        many = length > QUERIES and torch.is_grad_enabled()
        parts.append(checkpoint(some, *arguments, use_reentrant=False) if many else some(*arguments))
    return torch.cat(parts) if len(parts) > 1 else parts[0]
