"""An indexer that chooses blocks of keys, one choice for each group of heads: the best key of a block speaks for it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from .context import Context
from .documents import pack, unpack
from .indexer import chosen
from .rotary import RotaryStyle, rotate
from .selected_attention import NormedIndexer, causal


class BlockIndexer(NormedIndexer):
    """score_h(t, block) = max over the block's s <= t of q_h(x_t) . k(x_s); the top_k blocks of each head h.

    q = RMSNorm(query(x)) per head, k = RMSNorm(key(x)), turned by their positions. A block is `unit` tokens of a
    document, from its beginning. The block of the token itself and the local - 1 before it are chosen first, and count.
    Each head chooses for as many of the layer's heads, side by side.
    """

    def __init__(
        self,
        hidden: int,
        heads: int,
        head_dim: int,
        top_k: int,
        unit: int,
        local: int,
        norm_eps: float,
        norm_offset: float = 0.0,
        rotary: RotaryStyle | None = "half",
        table: int = 0,
    ):
        super().__init__(hidden, heads, head_dim, norm_eps, norm_offset, rotary, table)
        self.top_k, self.unit, self.score_unit, self.local = top_k, unit, unit, local
        self.groups = heads

    def scores(self, x: Tensor, latent: Tensor, context: Context) -> list[Tensor]:
        """x: [T, H]; latent is not used. For every run of documents [B, heads, S, blocks], -inf for blocks to come."""
        query = self.query_norm(self.query(x).unflatten(-1, (self.heads, -1)))
        key = self.key_norm(self.key(x))[:, None]
        if self.rotary is not None:
            cos, sin = context.tables[self.table]
            query, key = rotate(query, cos, sin, self.rotary), rotate(key, cos, sin, self.rotary)
        compute = torch.promote_types(x.dtype, torch.float32)
        found = []
        made = (unpack(part.to(compute), context.lengths) for part in (query, key))
        for q, k in zip(*made, strict=True):
            length = q.shape[1]
            scores = q.transpose(1, 2) @ k.transpose(1, 2).transpose(-1, -2)
            scores = scores.masked_fill(~causal(length, None, q.device), float("-inf"))
            scores = F.pad(scores, (0, -length % self.unit), value=float("-inf"))
            found.append(scores.unflatten(-1, (-1, self.unit)).amax(-1))
        return found

    def select(self, scores: list[Tensor], context: Context) -> Tensor:
        """[T, heads, K] blocks."""
        widest = min(self.top_k, -(-max(context.lengths, default=0) // self.unit))
        parts = []
        for found in scores:
            block = torch.arange(found.shape[2], device=found.device)[:, None] // self.unit
            near = (block - torch.arange(self.local, device=found.device)).clamp_min(0)
            near = near.expand(*found.shape[:2], -1, -1)
            parts.append(chosen(found.detach().scatter(-1, near, float("inf")), self.top_k, widest))
        return pack(parts)
