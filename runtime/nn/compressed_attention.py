"""Attention to the last tokens one by one and to all before in compressed form (DeepSeek-V4, section 2.3)."""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from .compressor import CompressedIndexer, Compressor
from .context import Context
from .documents import pack, unpack
from .index_loss import Judged, add_loss, divergence
from .linear import reset_linear
from .norm import RMSNorm
from .pooled_indexer import complete
from .rotary import RotaryStyle, rotate
from .selected_attention import causal, probabilities, softmax_attention


class CompressedAttention(nn.Module):
    """x: [T, H] -> [T, H]; each token attends to itself and to what precedes it in its own document.

    One head of keys, which are the values as well: key_norm(key(x)) of the last `window` tokens, and the compressor's
    entries of complete windows, all of them or those that the indexer chooses. query = query_up(c) per head, c =
    query_norm(query_down(x)), normed again without weight where head_norm_eps is given. Some channels, the last or the
    first of a head, are turned by the position; what a head gathers is turned back by the query's position. sinks: each
    head has a logit that takes attention and gives nothing. The output is low-rank and blockwise: the
    channels of all heads fall into `groups`, output_down makes output_rank of each, output reads them all.

    index_loss_over, index_loss: see `index_loss`.
    """

    uses_context = True
    lora_targets = ("query_down", "query_up", "key", "output")
    parallel_counts: ClassVar = ("heads", "groups")
    parallel_roles: ClassVar = {
        "query_down": "replicate",
        "query_norm": "replicate",
        "query_up": "column",
        "key": "replicate",
        "key_norm": "replicate",
        "compressor": "replicate",
        "indexer": "replicate",
        "sinks": "column",
        "output_down": "column",
        "output": "row",
    }

    def __init__(
        self,
        hidden: int,
        heads: int,
        head_dim: int,
        query_rank: int,
        scale: float,
        groups: int,
        output_rank: int,
        query_norm_eps: float,
        key_norm_eps: float,
        head_norm_eps: float | None = None,
        window: int | None = None,
        sinks: bool = True,
        rotary: RotaryStyle = "interleaved",
        rotary_at: Literal["first", "last"] = "last",
        table: int = 0,
        compressor: Compressor | None = None,
        indexer: CompressedIndexer | None = None,
    ):
        super().__init__()
        if heads * head_dim % groups:
            raise ValueError(f"the {heads * head_dim} channels of all heads do not fall into {groups} equal groups")
        if indexer is not None and compressor is None:
            raise ValueError("an indexer chooses compressed entries, but there is no compressor to make them")
        self.heads, self.head_dim, self.scale, self.window, self.groups = heads, head_dim, scale, window, groups
        self.rotary: RotaryStyle = rotary
        self.rotary_at, self.table = rotary_at, table
        self.query_down = nn.Linear(hidden, query_rank, bias=False)
        self.query_norm = RMSNorm(query_rank, query_norm_eps)
        self.query_up = nn.Linear(query_rank, heads * head_dim, bias=False)
        self.head_norm = RMSNorm(head_dim, head_norm_eps, scaled=False) if head_norm_eps is not None else None
        self.key = nn.Linear(hidden, head_dim, bias=False)
        self.key_norm = RMSNorm(head_dim, key_norm_eps)
        self.sinks = nn.Parameter(torch.empty(heads)) if sinks else None
        self.output_down = GroupedLinear(heads * head_dim, groups, output_rank)
        self.output = nn.Linear(groups * output_rank, hidden, bias=False)
        self.compressor, self.indexer = compressor, indexer
        self.index_loss_over: Judged | None = None
        self.index_loss: Tensor | None = None

    def reset_parameters(self, std: float) -> None:
        for linear in (self.query_down, self.query_up, self.key, self.output):
            reset_linear(linear, std)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if self.table >= len(context.tables):
            raise ValueError("this attention rotates queries and keys, but the model has no such rotary tables")
        cos, sin = context.tables[self.table]
        last = self.rotary_at == "last"
        latent = self.query_norm(self.query_down(x))
        query = self.query_up(latent).unflatten(-1, (self.heads, -1))
        if self.head_norm is not None:
            query = self.head_norm(query)
        query = rotate(query, cos, sin, self.rotary, last)
        key = rotate(self.key_norm(self.key(x))[:, None], cos, sin, self.rotary, last)
        attended = self._attend(x, latent, query, key, context)
        attended = rotate(attended, cos, -sin, self.rotary, last)
        return self.output(self.output_down(attended.flatten(-2)))

    def _attend(self, x: Tensor, latent: Tensor, query: Tensor, key: Tensor, context: Context) -> Tensor:
        entries = self.compressor(x, context) if self.compressor is not None else None
        picked = self._entries(x, latent, query, entries, context) if entries is not None else None
        parts = []
        documents = zip(unpack(query, context.lengths), unpack(key, context.lengths), strict=True)
        for number, (q, k) in enumerate(documents):
            q, k = q.transpose(1, 2), k.transpose(1, 2)
            visible = causal(q.shape[2], self.window, q.device)
            if entries is not None and picked is not None:
                k = torch.cat((k, entries[number][:, None]), 2)
                visible = torch.cat((visible.expand(*picked[number].shape[:-1], -1), picked[number]), -1)
            parts.append(softmax_attention(q, k, k, visible, self.scale, self.sinks).transpose(1, 2))
        return pack(parts) if parts else query

    def _entries(
        self, x: Tensor, latent: Tensor, query: Tensor, entries: list[Tensor], context: Context
    ) -> list[Tensor]:
        """For every run of documents [B, 1, S, W] bool: the entries that each token attends to."""
        assert self.compressor is not None
        queries = unpack(query, context.lengths)
        ready = [complete(q.shape[1], self.compressor.rate, q.device).expand(q.shape[0], 1, -1, -1) for q in queries]
        if self.indexer is None or not ready:
            return ready
        learns = self.index_loss_over is not None and torch.is_grad_enabled()
        with torch.set_grad_enabled(learns):
            scores = self.indexer.scores(x.detach(), latent.detach(), context)
        index = unpack(self.indexer.select(scores, context), context.lengths)
        picked = []
        for chosen, candidates in zip(index, ready, strict=True):
            units = candidates.shape[-1]
            marks = chosen.new_zeros((*chosen.shape[:-1], units + 1), dtype=torch.bool)
            marks.scatter_(-1, chosen.masked_fill(chosen < 0, units), True)
            picked.append(marks[..., :units].transpose(1, 2) & candidates)
        if learns and self.index_loss_over is not None:
            terms = []
            for q, entry, found, candidates, choice in zip(queries, entries, scores, ready, picked, strict=True):
                judged = candidates if self.index_loss_over == "all" else choice
                q, entry = q.detach().transpose(1, 2), entry.detach()[:, None]
                # A query without an entry would divide nothing by nothing.
                some = judged.any(-1, keepdim=True)
                weights = probabilities(q, entry, judged | ~some, self.scale)
                terms.append(divergence(found, weights.mean(1, keepdim=True), judged))
            if terms:
                add_loss(self, torch.stack(terms).sum())
        return picked


class GroupedLinear(nn.Module):
    """x: [T, width] -> [T, groups * rank]: each of `groups` equal parts of x is projected by itself."""

    parallel_counts: ClassVar = ("groups",)

    def __init__(self, width: int, groups: int, rank: int):
        super().__init__()
        self.groups = groups
        self.weight = nn.Parameter(torch.empty(groups * rank, width // groups))

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)

    def forward(self, x: Tensor) -> Tensor:
        parts = x.unflatten(-1, (self.groups, -1)).transpose(0, 1)
        weight = self.weight.unflatten(0, (self.groups, -1))
        return (parts @ weight.transpose(1, 2)).transpose(0, 1).flatten(1)
