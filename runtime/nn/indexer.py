"""The lightning indexer: a small attention whose scores choose the tokens that the layer attends to (DeepSeek Sparse
Attention, arXiv:2512.02556)."""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .context import Context
from .documents import pack, unpack
from .layer_norm import LayerNorm
from .linear import reset_linear
from .query_scale import LearnedPositionScale
from .rotary import RotaryStyle, rotate
from .selected_attention import Indexer, causal


class LightningIndexer(Indexer):
    """score(t, s) = sum_h w_h(x_t) * relu(q_h(c_t) . k(x_s)), and the top_k tokens s <= t of the own document.

    q = query(c), heads of head_dim; c is the layer's query latent, or its input through a LayerNorm (query_norm_eps).
    k = LayerNorm(key(x)); w = weight(x) / sqrt(heads) / sqrt(head_dim). As many channels of q and k as the table has
    are turned, the first or the last of a head. learned_position_scale: queries grow by a function of the position that
    each head learns. Scores in float32 at least.
    """

    lora_targets = ()
    parallel_roles: ClassVar = {"query": "replicate", "key": "replicate", "weight": "replicate"}

    def __init__(
        self,
        hidden: int,
        source: int,
        heads: int,
        head_dim: int,
        top_k: int,
        key_norm_eps: float,
        rotary: RotaryStyle | None = "half",
        rotary_at: Literal["first", "last"] = "first",
        query_norm_eps: float | None = None,
        learned_position_scale: bool = False,
        table: int = 0,
    ):
        super().__init__()
        self.heads, self.head_dim, self.top_k, self.table = heads, head_dim, top_k, table
        self.rotary: RotaryStyle | None = rotary
        self.rotary_at = rotary_at
        self.query_norm = LayerNorm(source, query_norm_eps, bias=True) if query_norm_eps is not None else None
        self.query = nn.Linear(source, heads * head_dim, bias=False)
        self.key = nn.Linear(hidden, head_dim, bias=False)
        self.key_norm = LayerNorm(head_dim, key_norm_eps, bias=True)
        self.weight = nn.Linear(hidden, heads, bias=False)
        self.query_position = LearnedPositionScale(heads) if learned_position_scale else None

    def reset_parameters(self, std: float) -> None:
        for linear in (self.query, self.key, self.weight):
            reset_linear(linear, std)

    def scores(self, x: Tensor, latent: Tensor, context: Context) -> list[Tensor]:
        """x: [T, H]; latent: [T, source]. For every run of documents [B, 1, S, S], -inf for tokens to come."""
        query = self.query(self.query_norm(latent) if self.query_norm is not None else latent)
        query = query.unflatten(-1, (self.heads, -1))
        if self.query_position is not None:
            query = self.query_position(query, context.position)
        key = self.key_norm(self.key(x))[:, None]
        if self.rotary is not None:
            cos, sin = context.tables[self.table]
            last = self.rotary_at == "last"
            query, key = rotate(query, cos, sin, self.rotary, last), rotate(key, cos, sin, self.rotary, last)
        parts = zip(*(unpack(part, context.lengths) for part in (query, key, self.weight(x))), strict=True)
        found = [relu_scores(q.transpose(1, 2), k.transpose(1, 2), w) for q, k, w in parts]
        return [s.masked_fill(~causal(s.shape[1], None, s.device), float("-inf"))[:, None] for s in found]

    def select(self, scores: list[Tensor], context: Context) -> Tensor:
        """[T, 1, K]: the tokens with the highest scores."""
        widest = min(self.top_k, max(context.lengths, default=0))
        return pack([chosen(found, self.top_k, widest) for found in scores])


def relu_scores(query: Tensor, key: Tensor, weight: Tensor) -> Tensor:
    """sum_h weight_h / sqrt(N) * relu(query_h . key / sqrt(D)).

    query: [B, N, S, D]; key: [B, 1, U, D]; weight: [B, S, N]. Returns [B, S, U], float32 at least."""
    compute = torch.promote_types(query.dtype, torch.float32)
    scores = F.relu(query.to(compute) @ key.to(compute).transpose(-1, -2) * query.shape[-1] ** -0.5)
    weights = weight.to(compute) * query.shape[1] ** -0.5
    return torch.einsum("bsn,bnsu->bsu", weights, scores)


def chosen(scores: Tensor, top_k: int, width: int) -> Tensor:
    """scores: [B, P, S, U] -> [B, S, P, width] int64: the best units, -1 where there are fewer than that."""
    best = scores.detach().topk(min(top_k, scores.shape[-1]), dim=-1)
    index = best.indices.masked_fill(best.values == float("-inf"), -1)
    return F.pad(index, (0, width - index.shape[-1]), value=-1).transpose(1, 2)
