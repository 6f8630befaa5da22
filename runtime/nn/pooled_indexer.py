"""Indexers that score pools of neighbouring tokens, not single ones: what is chosen are whole pools, and the tokens
after the last complete pool are always seen."""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .context import Context
from .documents import pack, unpack
from .indexer import relu_scores
from .layer_norm import LayerNorm
from .linear import reset_linear
from .rotary import RotaryStyle, rotate
from .selected_attention import Indexer, NormedIndexer


class PooledIndexer(Indexer):
    """score(t, pool) = sum_h w_h(x_t) * relu(q_h(c_t) . k(pool)), k(pool) a learned average of LayerNorm(key(x)).

    A pool is `pool` tokens of a document, from its beginning; a channel of its key is averaged with weights
    softmax(gate(x) + place) over the pool, place: [pool, head_dim]. A query may choose pools that end no later than
    itself, top_k // pool of them; tail: it also sees the tokens since the last of those. Else as `LightningIndexer`
    without rotation.
    """

    lora_targets = ()
    parallel_roles: ClassVar = {
        "query": "replicate",
        "key": "replicate",
        "weight": "replicate",
        "gate": "replicate",
        "place": "replicate",
    }

    def __init__(
        self,
        hidden: int,
        source: int,
        heads: int,
        head_dim: int,
        top_k: int,
        pool: int,
        key_norm_eps: float,
        tail: bool = True,
    ):
        super().__init__()
        self.heads, self.top_k, self.score_unit, self.tail = heads, top_k, pool, tail
        self.query = nn.Linear(source, heads * head_dim, bias=False)
        self.key = nn.Linear(hidden, head_dim, bias=False)
        self.key_norm = LayerNorm(head_dim, key_norm_eps, bias=True)
        self.weight = nn.Linear(hidden, heads, bias=False)
        self.gate = nn.Linear(hidden, head_dim, bias=False)
        self.place = nn.Parameter(torch.empty(pool, head_dim))

    def reset_parameters(self, std: float) -> None:
        for linear in (self.query, self.key, self.weight, self.gate):
            reset_linear(linear, std)
        nn.init.zeros_(self.place)

    def scores(self, x: Tensor, latent: Tensor, context: Context) -> list[Tensor]:
        """x: [T, H]; latent: [T, source]. For every run of documents [B, 1, S, pools], -inf for pools to come."""
        query = self.query(latent).unflatten(-1, (self.heads, -1))
        made = (query, self.key_norm(self.key(x)), self.gate(x), self.weight(x))
        found = []
        for q, k, gate, weight in zip(*(unpack(part, context.lengths) for part in made), strict=True):
            compute = torch.promote_types(gate.dtype, torch.float32)
            share = (pools_of(gate, self.score_unit).to(compute) + self.place.to(compute)).softmax(2)
            pooled = (share.to(k.dtype) * pools_of(k, self.score_unit)).sum(2)
            scores = relu_scores(q.transpose(1, 2), pooled[:, None], weight)
            found.append(scores.masked_fill(~complete(q.shape[1], self.score_unit, q.device), float("-inf"))[:, None])
        return found

    def select(self, scores: list[Tensor], context: Context) -> Tensor:
        """[T, 1, K] tokens."""
        parts = [best_pools(found, self.top_k // self.score_unit) for found in scores]
        return tokens_of(parts, self.score_unit, tail=self.tail)


class MeanPooledIndexer(NormedIndexer):
    """score(t, pool) = sum_h relu(q_h(x_t) . k(pool)) / sqrt(head_dim).

    q = RMSNorm(query(x)) per head, turned by the token's position; k = RMSNorm(mean over the pool of key(x)), turned by
    the position of the pool's first token. A query chooses budget // pool of the pools that end no later than itself,
    and sees the tokens since the last of those.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        head_dim: int,
        budget: int,
        pool: int,
        norm_eps: float,
        norm_offset: float = 0.0,
        rotary: RotaryStyle | None = "half",
        table: int = 0,
    ):
        super().__init__(hidden, heads, head_dim, norm_eps, norm_offset, rotary, table)
        self.head_dim, self.budget, self.score_unit = head_dim, budget, pool

    def scores(self, x: Tensor, latent: Tensor, context: Context) -> list[Tensor]:
        """x: [T, H]; latent is not used. For every run of documents [B, 1, S, pools], -inf for pools to come."""
        query = self.query_norm(self.query(x).unflatten(-1, (self.heads, -1)))
        made = [query, self.key(x)]
        if self.rotary is not None:
            cos, sin = context.tables[self.table]
            made = [rotate(query, cos, sin, self.rotary), self.key(x), cos, sin]
        found = []
        for q, k, *tables in zip(*(unpack(part, context.lengths) for part in made), strict=True):
            compute = torch.promote_types(k.dtype, torch.float32)
            key = self.key_norm(pools_of(k, self.score_unit).to(compute).mean(2).to(k.dtype))
            if self.rotary is not None:
                starts = (pools_of(table, self.score_unit)[:, :, 0].flatten(0, 1) for table in tables)
                key = rotate(key.flatten(0, 1)[:, None], *starts, self.rotary)[:, 0].view_as(key)
            scores = F.relu(q.transpose(1, 2).to(compute) @ key[:, None].to(compute).transpose(-1, -2))
            scores = scores.sum(1) / self.head_dim**0.5
            found.append(scores.masked_fill(~complete(q.shape[1], self.score_unit, q.device), float("-inf"))[:, None])
        return found

    def select(self, scores: list[Tensor], context: Context) -> Tensor:
        """[T, 1, K] tokens."""
        parts = [best_pools(found, self.budget // self.score_unit, self.score_unit) for found in scores]
        return tokens_of(parts, self.score_unit, tail=True)


def pools_of(x: Tensor, pool: int) -> Tensor:
    """[B, S, ...] -> [B, S // pool, pool, ...]: the complete pools of every document."""
    count = x.shape[1] // pool
    return x[:, : count * pool].unflatten(1, (count, pool))


def complete(length: int, pool: int, device: torch.device) -> Tensor:
    """[S, S // pool] bool: the pools that end no later than each token."""
    ends = torch.arange(1, length // pool + 1, device=device) * pool
    return ends <= torch.arange(1, length + 1, device=device)[:, None]


def best_pools(scores: Tensor, count: int, pool: int | None = None) -> Tensor:
    """scores: [B, 1, S, U] -> [B, S, K] int64, -1 where a token has fewer candidates than K = min(count, U).

    pool: tokens with equally many complete pools of this size are ranked among themselves, without pools to come. Which
    of several equal scores wins depends on how many there are, and some references look at each token by itself.
    """
    scores = scores.detach()[:, 0]
    width = min(count, scores.shape[-1])
    if pool is None:
        best = scores.topk(width, dim=-1)
        return best.indices.masked_fill(best.values == float("-inf"), -1)
    index = scores.new_full((*scores.shape[:-1], width), -1, dtype=torch.int64)
    for number in range(1, scores.shape[-1] + 1):
        tokens, kept = slice(number * pool - 1, (number + 1) * pool - 1), min(width, number)
        index[:, tokens, :kept] = scores[:, tokens, :number].topk(kept, dim=-1).indices
    return index


def tokens_of(pools: list[Tensor], pool: int, *, tail: bool) -> Tensor:
    """pools: for every run of documents [B, S, K] -> [T, 1, K * pool (+ pool - 1)] tokens, -1 for none.

    tail: and the tokens after the last pool that ends no later than the token itself.
    """
    widest = max((part.shape[-1] for part in pools), default=0)
    parts = []
    for index in pools:
        index = F.pad(index, (0, widest - index.shape[-1]), value=-1)
        inside = torch.arange(pool, device=index.device)
        tokens = torch.where(index[..., None] < 0, -1, index[..., None] * pool + inside).flatten(-2)
        if tail:
            position = torch.arange(index.shape[1], device=index.device)[:, None]
            last = (position + 1) // pool * pool + inside[:-1]
            last = last.masked_fill(last > position, -1)
            tokens = torch.cat((tokens, last.expand(index.shape[0], -1, -1)), -1)
        parts.append(tokens[:, :, None])
    return pack(parts)
