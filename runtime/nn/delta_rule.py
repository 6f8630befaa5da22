"""The gated delta rule, chunk by chunk (Yang, Kautz and Hatamizadeh 2024, arXiv:2412.06464; with a decay for every
channel: Kimi Linear, arXiv:2510.26692). The chunked form follows Yang et al. 2024, arXiv:2406.06484."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .chunks import chunks_of
from .cut import Cut, carried


def gated_delta_rule(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, lengths: tuple[int, ...], chunk: int = 64
) -> Tensor:
    """S_t = (I - beta_t k_t k_t^T) diag(exp(decay_t)) S_{t-1} + beta_t k_t v_t^T;  o_t = S_t^T q_t, S = 0 at first.

    query, key: [T, N, K], value: [T, N, V], beta: [T, N]; decay: [T, N, K], or [T, N, 1] for one a head, at most 0.
    Returns [T, N, V] in value's dtype; computed in float32, or float64 for float64 inputs. `chunk`, a power of two,
    changes speed and memory only.

    Within a chunk, what each token writes solves one triangular system; between chunks only S is carried. Every
    exponent is a sum of decays over the tokens between two places, so that no decay, however strong, overflows.
    """
    if not value.shape[0]:
        return value
    wide = torch.promote_types(value.dtype, torch.float32)
    chunks = chunks_of(lengths, chunk, value.device)
    inputs = (query, key, value, decay, beta[..., None])
    q, k, v, g, b = (chunks.cut(x.to(wide)).transpose(1, 2) for x in inputs)  # [M, N, C, ...]
    attended, erased = decayed_scores(torch.stack([q, k * b]), k, g)
    since_start = g.cumsum(-2).exp()
    until_end = sum_after(g).exp()
    system = erased.tril(-1)
    written = torch.linalg.solve_triangular(
        system, torch.cat([v * b, k * b * since_start], -1), upper=False, unitriangular=True
    )
    fresh, old = written.split([v.shape[-1], k.shape[-1]], -1)
    total = g.sum(-2).exp()[..., None]  # [M, N, K or 1, 1]

    state = k.new_zeros(chunks.steps[0], k.shape[1], k.shape[-1], v.shape[-1])
    if isinstance(lengths, Cut):
        own = [[x[chunks.last] for x in part.split(chunks.steps) if len(x) > chunks.last] for part in (
            fresh, old, k * until_end, total)]  # fmt: skip
        state = chunks.started(state, _state_from_other_ranks(own, lengths))
    results = []
    pieces = (x.split(chunks.steps) for x in (q * since_start, attended, fresh, old, k * until_end, total))
    for q_n, attended_n, fresh_n, old_n, k_n, total_n in zip(*pieces, strict=True):
        state = state[: len(q_n)]
        change = fresh_n - old_n @ state
        results.append(q_n @ state + attended_n @ change)
        state = total_n * state + k_n.transpose(-1, -2) @ change
    return chunks.join(torch.cat(results).transpose(1, 2)).to(value.dtype)


def _state_from_other_ranks(own: Sequence[Sequence[Tensor]], lengths: Cut) -> Tensor:
    """own: (fresh, old, k, total) of every chunk of this rank's last document, [N, ...] each -> [N, K, V].

    What a chunk does to a state is affine, S -> A S + B; A is what it does to the identity where it writes nothing.
    """
    fresh, old = own[0][0], own[1][0]
    heads, keys, values = old.shape[0], old.shape[-1], fresh.shape[-1]
    written = old.new_zeros(heads, keys, values)
    kept = torch.eye(keys, dtype=old.dtype, device=old.device).expand(heads, -1, -1)
    for fresh_n, old_n, k_n, total_n in zip(*own, strict=True):
        both = torch.cat([written, kept], -1)
        change = F.pad(fresh_n, (0, keys)) - old_n @ both
        written, kept = (total_n * both + k_n.transpose(-1, -2) @ change).split([values, keys], -1)
    start = torch.zeros_like(written)
    return carried((kept, written), (start,), lambda does, state: (does[0] @ state[0] + does[1],), lengths)[0]


def decayed_scores(rows: Tensor, keys: Tensor, decay: Tensor) -> Tensor:
    """[..., i, j] = sum_k rows_ik keys_jk exp(sum of decay_sk over j < s <= i), 0 where j > i.

    rows, keys: [..., C, K], C a power of two; decay: [..., C, K] or [..., C, 1]. Returns [..., C, C].
    """
    if decay.shape[-1] == 1:
        between = decay.expand(*decay.shape[:-1], decay.shape[-2]).tril(-1).cumsum(-2)
        return (rows @ keys.transpose(-1, -2) * between.exp()).tril()
    size = keys.shape[-2]
    if size == 1:
        return rows @ keys.transpose(-1, -2)
    # Two halves: each by itself, and the later rows on the earlier keys through the border, where both exponents end.
    r, k, g = (x.unflatten(-2, (2, size // 2)) for x in (rows, keys, decay))
    inside = decayed_scores(r, k, g)
    late = r[..., 1, :, :] * g[..., 1, :, :].cumsum(-2).exp()
    early = k[..., 0, :, :] * sum_after(g[..., 0, :, :]).exp()
    across = late @ early.transpose(-1, -2)
    first = torch.cat([inside[..., 0, :, :], torch.zeros_like(across)], -1)
    return torch.cat([first, torch.cat([across, inside[..., 1, :, :]], -1)], -2)


def sum_after(x: Tensor) -> Tensor:
    """The sum over the places behind each one in its chunk. x: [..., C, K] -> [..., C, K]."""
    later = x[..., 1:, :].flip(-2).cumsum(-2).flip(-2)
    return F.pad(later, (0, 0, 0, 1))
