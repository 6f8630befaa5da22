"""Softmax attention over selected keys (DeepSeek Sparse Attention, arXiv:2512.02556).

A selection is an index [T, P, K] int64: for each token and each of P groups of heads, which units of its own document
are attended to; -1 for none. A unit is `unit` consecutive tokens, 1 for single tokens.
"""

from collections.abc import Sequence
from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attend import Visibility, attend
from .context import Context
from .cut import Cut
from .documents import pack, unpack
from .linear import reset_linear
from .norm import RMSNorm
from .rotary import RotaryStyle

SELECTED = "selected"  # context.shared: the index of the last layer that made one
Unseeing = Literal["itself", "all"]  # what a token attends to that nothing is chosen for


class Indexer(nn.Module):
    """What chooses. unit: tokens of what an index counts; score_unit: tokens of what is scored; groups: of heads, each
    with a choice of its own."""

    unit: int = 1
    score_unit: int = 1
    groups: int = 1

    def scores(self, x: Tensor, latent: Tensor, context: Context) -> list[Tensor]:
        """x: [T, H], the layer's input; latent: [T, L], what its queries are made from. For every run of equally long
        documents [B, P, S, U], -inf for units that a token must not choose."""
        raise NotImplementedError

    def select(self, scores: list[Tensor], context: Context) -> Tensor:
        """The index [T, P, K]."""
        raise NotImplementedError


class NormedIndexer(Indexer):
    """An indexer whose queries and keys are projections of the layer's input, each with an RMS norm over a head, turned
    by their positions."""

    lora_targets = ()
    parallel_roles: ClassVar = {"query": "replicate", "key": "replicate"}

    def __init__(
        self,
        hidden: int,
        heads: int,
        head_dim: int,
        norm_eps: float,
        norm_offset: float,
        rotary: RotaryStyle | None,
        table: int,
    ):
        super().__init__()
        self.heads = heads
        self.rotary: RotaryStyle | None = rotary
        self.table = table
        self.query = nn.Linear(hidden, heads * head_dim, bias=False)
        self.key = nn.Linear(hidden, head_dim, bias=False)
        self.query_norm = RMSNorm(head_dim, norm_eps, norm_offset)
        self.key_norm = RMSNorm(head_dim, norm_eps, norm_offset)

    def reset_parameters(self, std: float) -> None:
        for linear in (self.query, self.key):
            reset_linear(linear, std)


def attend_selected(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    lengths: Sequence[int],
    scale: float,
    index: Tensor | None = None,
    unit: int = 1,
    window: int | None = None,
    sinks: Tensor | None = None,
    unseeing: Unseeing = "itself",
) -> Tensor:
    """Causal attention inside each document, to the selected units only (all of them without an index).

    query: [T, N, D]; key: [T, G, D]; value: [T, G, E]. window: the last `window` tokens only. sinks: [N], the logit of
    a key that every token attends to and that has no value. unseeing: what a token attends to that nothing is chosen
    for: itself, or all tokens of its document, those to come too, equally: a mask of large numbers in place of
    infinities leaves nothing else of its scores but their gradient.
    Returns [T, N, E].
    """
    if isinstance(lengths, Cut):
        if index is not None:
            raise ValueError("a selection of keys on other ranks is not supported")
        return attend(query, key, value, lengths, scale, Visibility(window=window), sinks=sinks)
    if not query.shape[0]:
        return query.new_zeros(*query.shape[:2], value.shape[-1])
    chosen = unpack(index, lengths) if index is not None else None
    parts = []
    documents = zip(unpack(query, lengths), unpack(key, lengths), unpack(value, lengths), strict=True)
    for number, (q, k, v) in enumerate(documents):
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        if chosen is None and window is None and sinks is None:
            parts.append(_scaled_dot_product(q, k, v, scale, None).transpose(1, 2))
            continue
        length = q.shape[2]
        visible = causal(length, window, q.device)
        if chosen is not None:
            visible = visible & per_head(selected_tokens(chosen[number], length, unit), q.shape[1])
            if unseeing == "itself":
                own = torch.eye(length, dtype=torch.bool, device=q.device)
                visible = visible | (~visible.any(-1, keepdim=True) & own)
            else:
                visible = torch.zeros_like(visible, dtype=q.dtype).masked_fill(~visible, torch.finfo(q.dtype).min)
        parts.append(softmax_attention(q, k, v, visible, scale, sinks).transpose(1, 2))
    return pack(parts)


def softmax_attention(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """query: [B, N, S, D]; key: [B, G, U, D]; value: [B, G, U, E]; visible: bool, or numbers to add to the scores where
    there are no sinks, broadcast to [B, N, S, U]; sinks: [N]. Returns [B, N, S, E]."""
    if sinks is None:
        return _scaled_dot_product(query, key, value, scale, visible)
    weights = probabilities(query, key, visible, scale, sinks)
    return weights.to(value.dtype) @ _repeated(value, query.shape[1])


def probabilities(query: Tensor, key: Tensor, visible: Tensor, scale: float, sinks: Tensor | None = None) -> Tensor:
    """The attention weights [B, N, S, U], in float32 at least; what a sink takes is missing from their sum."""
    compute = torch.promote_types(query.dtype, torch.float32)
    logits = (query @ _repeated(key, query.shape[1]).transpose(-1, -2)).to(compute) * scale
    logits = logits.masked_fill(~visible, float("-inf"))
    if sinks is None:
        return logits.softmax(-1)
    taken = sinks.to(compute)[:, None, None].expand(*logits.shape[:-1], 1)
    return torch.cat((logits, taken), -1).softmax(-1)[..., :-1]


def causal(length: int, window: int | None, device: torch.device) -> Tensor:
    """[S, S] bool: which keys come no later than each query, and no more than window - 1 tokens before it."""
    age = torch.arange(length, device=device)[:, None] - torch.arange(length, device=device)
    return (age >= 0) if window is None else (age >= 0) & (age < window)


def selected_tokens(index: Tensor, length: int, unit: int) -> Tensor:
    """index: [B, S, P, K] -> [B, P, S, S] bool: the tokens in the selected units."""
    units = -(-length // unit)
    chosen = index.new_zeros((*index.shape[:-1], units + 1), dtype=torch.bool)
    chosen.scatter_(-1, index.masked_fill(index < 0, units), True)
    chosen = chosen[..., :units].transpose(1, 2)
    return chosen if unit == 1 else chosen.repeat_interleave(unit, -1)[..., :length]


def per_head(visible: Tensor, heads: int) -> Tensor:
    """[B, P, S, U] -> what broadcasts to [B, N, S, U]: consecutive heads share a group."""
    groups = visible.shape[1]
    return visible if groups in (1, heads) else visible.repeat_interleave(heads // groups, 1)


def _repeated(x: Tensor, heads: int) -> Tensor:
    return x if x.shape[1] in (1, heads) else x.repeat_interleave(heads // x.shape[1], 1)


def _scaled_dot_product(query: Tensor, key: Tensor, value: Tensor, scale: float, visible: Tensor | None) -> Tensor:
    grouped = query.shape[1] != key.shape[1]
    width, wanted = query.shape[-1], value.shape[-1]
    # Fused kernels want queries, keys and values equally wide; zeros change nothing.
    if wanted < width:
        value = F.pad(value, (0, width - wanted))
    elif wanted > width:
        query, key = F.pad(query, (0, wanted - width)), F.pad(key, (0, wanted - width))
    result = F.scaled_dot_product_attention(
        query, key, value, attn_mask=visible, is_causal=visible is None, scale=scale, enable_gqa=grouped
    )
    return result[..., :wanted]
