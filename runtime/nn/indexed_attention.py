"""Grouped-query attention to what an indexer chooses (DeepSeek Sparse Attention, arXiv:2512.02556)."""

import torch
from torch import Tensor, nn

from .attention import GroupedQueryAttention
from .context import Context
from .index_loss import Judged, add_loss, index_loss
from .selected_attention import SELECTED, Indexer, attend_selected


class IndexedAttention(nn.Module):
    """x: [T, H] -> [T, H]: `attention`, each token of which attends only to what `indexer` chooses for it.

    attention: its window, chunk, softcap and learned bias are not used. Writes context.shared["selected"], the index.
    """

    uses_context = True

    def __init__(self, attention: GroupedQueryAttention, indexer: Indexer):
        super().__init__()
        self.attention, self.indexer = attention, indexer
        self.index_loss_over: Judged | None = None
        self.index_loss: Tensor | None = None

    @property
    def parallel_roles(self) -> dict[str, str] | None:
        """An indexer that chooses for several groups of heads numbers all of them: such a layer is not cut."""
        return {"indexer": "replicate"} if self.indexer.groups == 1 else None

    def forward(self, x: Tensor, context: Context) -> Tensor:
        attention = self.attention
        if not x.shape[0]:
            return attention(x, context)
        query, key, value = attention.projections(x, context)
        query, key = attention.positioned(query, key, context)
        learns = self.index_loss_over is not None and torch.is_grad_enabled()
        with torch.set_grad_enabled(learns):
            scores = self.indexer.scores(x.detach(), x.detach(), context)
        index = self.indexer.select(scores, context)
        context.shared[SELECTED] = index
        if learns and self.index_loss_over is not None:
            loss = index_loss(
                scores, query.detach(), key.detach(), index, context.lengths, attention.scale, self.indexer,
                self.index_loss_over,
            )  # fmt: skip
            add_loss(self, loss)
        attended = attend_selected(
            query, key, value, context.lengths, attention.scale, index, self.indexer.unit, sinks=attention.sinks
        )
        return attention.output(attention.gated(attended, x).flatten(-2))
