"""Recurrences that keep their channels apart, chunk by chunk; inside a chunk by doubling (Hillis and Steele 1986)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .chunks import chunks_of
from .cut import Cut, carried


def linear_recurrence(decay: Tensor, update: Tensor, lengths: tuple[int, ...], chunk: int = 64) -> Tensor:
    """h_t = decay_t * h_{t-1} + update_t, h = 0 before a document.  [T, C] each -> [T, C], in update's dtype.

    Computed in float32, or float64 for float64 inputs. `chunk`, a power of two, changes speed and memory only.
    """
    if isinstance(lengths, Cut):
        return _recurrence_across_ranks(decay, update, lengths, chunk)
    if not update.shape[0]:
        return update
    wide = torch.promote_types(update.dtype, torch.float32)
    chunks = chunks_of(lengths, chunk, update.device)
    kept, inside = scan(chunks.cut(decay.to(wide)), chunks.cut(update.to(wide)))
    state = inside.new_zeros(chunks.steps[0], update.shape[1])
    results = []
    for kept_n, inside_n in zip(kept.split(chunks.steps), inside.split(chunks.steps), strict=True):
        states = inside_n + kept_n * state[: len(inside_n), None]
        results.append(states)
        state = states[:, -1]
    return chunks.join(torch.cat(results)).to(update.dtype)


def scan(decay: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
    """Along dimension 1: the product of decays so far, and h_t = decay_t h_{t-1} + update_t from h = 0. [M, C, ...]."""
    shift = 1
    while shift < update.shape[1]:
        none, one = torch.zeros_like(update[:, :shift]), torch.ones_like(decay[:, :shift])
        update = update + decay * torch.cat([none, update[:, :-shift]], 1)
        decay = decay * torch.cat([one, decay[:, :-shift]], 1)
        shift *= 2
    return decay, update


def selective_scan(
    u: Tensor, dt: Tensor, rate: Tensor, B: Tensor, C: Tensor, lengths: tuple[int, ...], chunk: int = 16
) -> Tensor:
    """h_t = exp(-rate * dt_t) h_{t-1} + dt_t B_t u_t;  y_t = C_t h_t, h = 0 before a document (arXiv:2312.00752).

    u, dt: [T, N, P], rate: [N, P, S] positive, B, C: [T, N, S] -> [T, N, P], in u's dtype; computed in float32, or
    float64 for float64 inputs. Only the states between chunks are kept for the backward pass.
    """
    if isinstance(lengths, Cut):
        return _scan_across_ranks(u, dt, rate, B, C, lengths, chunk)
    if not u.shape[0]:
        return u
    wide = torch.promote_types(u.dtype, torch.float32)
    chunks = chunks_of(lengths, chunk, u.device)
    pieces = (chunks.cut(x.to(wide)).split(chunks.steps) for x in (u, dt, B, C))
    state = u.new_zeros(chunks.steps[0], *rate.shape, dtype=wide)
    results = []
    for piece in zip(*pieces, strict=True):
        given = (state[: len(piece[0])], rate.to(wide), *piece)
        if torch.is_grad_enabled():
            y, state = checkpoint(_one_chunk, *given, use_reentrant=False)  # type: ignore[misc]
        else:
            y, state = _one_chunk(*given)
        results.append(y)
    return chunks.join(torch.cat(results)).to(u.dtype)


def _one_chunk(state: Tensor, rate: Tensor, u: Tensor, dt: Tensor, B: Tensor, C: Tensor) -> tuple[Tensor, Tensor]:
    """What a chunk gives and the state behind it. state: [n, N, P, S]; u, dt: [n, C, N, P]; B, C: [n, C, N, S]."""
    decay = (-rate * dt[..., None]).exp()
    kept, inside = scan(decay, (dt * u)[..., None] * B[..., None, :])
    states = inside + kept * state[:, None]
    return (states @ C[..., None])[..., 0], states[:, -1]


def _then(does: Sequence[Tensor], state: Sequence[Tensor]) -> tuple[Tensor]:
    """does: (what is kept, what is added)."""
    return (does[0] * state[0] + does[1],)


def _recurrence_across_ranks(decay: Tensor, update: Tensor, lengths: Cut, chunk: int) -> Tensor:
    wide = torch.promote_types(update.dtype, torch.float32)
    inside = linear_recurrence(decay, update.to(wide), tuple(lengths), chunk)
    kept = decay[len(decay) - lengths[-1] :].to(wide).prod(0)
    (state,) = carried((kept, inside[-1]), (torch.zeros_like(kept),), _then, lengths)
    first = inside[: lengths[0]] + decay[: lengths[0]].to(wide).cumprod(0) * state
    return torch.cat([first, inside[lengths[0] :]]).to(update.dtype)


def _scan_across_ranks(u: Tensor, dt: Tensor, rate: Tensor, B: Tensor, C: Tensor, lengths: Cut, chunk: int) -> Tensor:
    """State and what is read of it some rows at a time, made again in the backward pass."""
    wide = torch.promote_types(u.dtype, torch.float32)
    inside = selective_scan(u.to(wide), dt, rate, B, C, tuple(lengths), chunk)
    rate, last = rate.to(wide), slice(len(u) - lengths[-1], None)
    written = torch.zeros_like(rate)
    for piece in zip(*(part[last].to(wide).split(chunk) for part in (u, dt, B)), strict=True):
        written = _again(_written, written, rate, *piece)
    kept = (-rate * dt[last].to(wide).sum(0)[..., None]).exp()
    (state,) = carried((kept, written), (torch.zeros_like(rate),), _then, lengths)
    reads = []
    for dt_n, C_n in zip(*(part[: lengths[0]].to(wide).split(chunk) for part in (dt, C)), strict=True):
        reads.append(_again(_read, state, rate, dt_n, C_n))
        state = (-rate * dt_n.sum(0)[..., None]).exp() * state
    return torch.cat([inside[: lengths[0]] + torch.cat(reads), inside[lengths[0] :]]).to(u.dtype)


def _again(fn: Callable[..., Tensor], *given: Tensor) -> Tensor:
    return checkpoint(fn, *given, use_reentrant=False) if torch.is_grad_enabled() else fn(*given)  # type: ignore


def _written(state: Tensor, rate: Tensor, u: Tensor, dt: Tensor, B: Tensor) -> Tensor:
    """The state after some tokens. state, rate: [N, P, S]; u, dt: [C, N, P]; B: [C, N, S]."""
    later = dt.sum(0) - dt.cumsum(0)
    added = ((-rate * later[..., None]).exp() * (dt * u)[..., None] * B[..., None, :]).sum(0)
    return (-rate * dt.sum(0)[..., None]).exp() * state + added


def _read(state: Tensor, rate: Tensor, dt: Tensor, C: Tensor) -> Tensor:
    """[C, N, P]: of a state that only decays."""
    return ((-rate * dt.cumsum(0)[..., None]).exp() * state * C[..., None, :]).sum(-1)
