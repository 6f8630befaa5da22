"""Linear attention with a decaying state, chunk by chunk (Dao and Gu 2024, arXiv:2405.21060, section 6)."""

import torch
from torch import Tensor

from .chunks import chunks_of
from .cut import Cut, carried
from .delta_rule import decayed_scores, sum_after


def decayed_linear_attention(
    query: Tensor, key: Tensor, value: Tensor, decay: Tensor, lengths: tuple[int, ...], chunk: int = 64
) -> Tensor:
    """S_t = diag(exp(decay_t)) S_{t-1} + k_t v_t^T;  o_t = S_t^T q_t, S = 0 before a document.

    query, key: [T, N, K], value: [T, N, V]; decay: [T, N, K], or [T, N, 1] for one a head, at most 0.
    Returns [T, N, V] in value's dtype; computed in float32, or float64 for float64 inputs. `chunk`, a power of two,
    changes speed and memory only. No exponent is positive, so that no decay overflows.
    """
    if isinstance(lengths, Cut):
        return _across_ranks(query, key, value, decay, lengths, chunk)
    if not value.shape[0]:
        return value
    wide = torch.promote_types(value.dtype, torch.float32)
    chunks = chunks_of(lengths, chunk, value.device)
    q, k, v, g = (chunks.cut(x.to(wide)).transpose(1, 2) for x in (query, key, value, decay))  # [M, N, C, ...]
    inside = decayed_scores(q, k, g) @ v
    written = (k * sum_after(g).exp()).transpose(-1, -2) @ v
    kept = g.sum(-2).exp()[..., None]  # [M, N, K or 1, 1]

    state = k.new_zeros(chunks.steps[0], k.shape[1], k.shape[-1], v.shape[-1])
    carried = []
    for read_n, written_n, kept_n in zip(
        *(x.split(chunks.steps) for x in (q * g.cumsum(-2).exp(), written, kept)), strict=True
    ):
        state = state[: len(read_n)]
        carried.append(read_n @ state)
        state = kept_n * state + written_n
    return chunks.join((inside + torch.cat(carried)).transpose(1, 2)).to(value.dtype)


def _across_ranks(query: Tensor, key: Tensor, value: Tensor, decay: Tensor, lengths: Cut, chunk: int) -> Tensor:
    """What the rank's own tokens give, and what its first tokens read of the state that comes from other ranks."""
    wide = torch.promote_types(value.dtype, torch.float32)
    inside = decayed_linear_attention(query, key, value.to(wide), decay, tuple(lengths), chunk)
    last, first = slice(len(value) - lengths[-1], None), slice(0, lengths[0])
    k, v, g = (part[last].to(wide) for part in (key, value, decay))
    later = sum_after(g.transpose(0, 1)).exp()  # [N, T, K or 1]
    written = (k.transpose(0, 1) * later).transpose(1, 2) @ v.transpose(0, 1)
    kept = g.sum(0)[..., None].exp()
    start = torch.zeros_like(written)
    (state,) = carried(
        (kept, written), (start,), lambda does, state: (does[0] * state[0] + does[1],), lengths
    )  # fmt: skip
    read = (query[first].to(wide) * decay[first].to(wide).cumsum(0).exp()).transpose(0, 1) @ state
    return torch.cat([inside[first] + read.transpose(0, 1), inside[lengths[0] :]]).to(value.dtype)
