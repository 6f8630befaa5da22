"""A router whose choice is a table over token ids (Roller et al. 2021, arXiv:2106.04426)."""

import torch
from torch import Tensor

from .context import Context
from .router import Router, Score
from .selection import Normalise


class HashRouter(Router):
    """Each token id has its own K experts, in `table` [vocabulary, K] int64; only their weights are learned.

    weights: scores of the logits W x, gathered at the table's experts, normalised, times scale.
    """

    uses_context = True
    context_parallel = True

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        vocabulary: int,
        score: Score = "softmax",
        normalise: Normalise | None = None,
        scale: float = 1.0,
    ):
        super().__init__(hidden, experts, top_k, score, normalise=normalise, scale=scale)
        self.table: Tensor
        self.register_buffer("table", torch.empty(vocabulary, top_k, dtype=torch.int64))

    def reset_parameters(self, std: float) -> None:
        super().reset_parameters(std)
        tokens, copies = self.table.shape
        first = torch.arange(tokens, device=self.table.device)[:, None] * copies
        self.table.copy_((first + torch.arange(copies, device=self.table.device)) % self.experts)

    def select(self, scores: Tensor, context: Context | None) -> Tensor:
        if context is None or context.ids is None:
            raise ValueError("this router chooses by token ids, and the context has none")
        return self.table[context.ids]
