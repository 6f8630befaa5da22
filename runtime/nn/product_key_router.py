"""Routing over very many small experts by product keys (Lample et al. 2019, arXiv:1907.05242)."""

import math

import torch
from torch import Tensor, nn

from .context import Context
from .router import Routing, linear
from .selection import Normalise


class ProductKeyRouter(Routing):
    """Expert i * n + j, n = floor(sqrt(experts)), has the score a_i + b_j of two lists of n logits; softmax over the
    best K. Experts past n * n are never chosen.

    W: [2n, H]. Which logits are a and which b: of a document's product W x [S, 2n], read in order, the first half is
    a [S, n] and the second half b. So does the reference, and so a token's scores depend on other tokens of its
    document, later ones too.
    """

    uses_context = True

    def __init__(self, hidden: int, experts: int, top_k: int, normalise: Normalise | None = None):
        super().__init__()
        self.experts, self.top_k, self.normalise, self.keys = experts, top_k, normalise, math.isqrt(experts)
        self.weight = nn.Parameter(torch.empty(2 * self.keys, hidden))

    @property
    def choices(self) -> int:
        return self.keys**2

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)

    def forward(self, x: Tensor, context: Context | None = None) -> tuple[Tensor, Tensor]:
        logits = linear(x.to(torch.promote_types(x.dtype, torch.float32)), self.weight)
        documents = logits.split(list(context.lengths)) if context is not None and context.lengths else (logits,)
        lists = torch.cat([part.reshape(2, part.shape[0], self.keys) for part in documents], 1)
        (a, b), (row, column) = lists.topk(self.keys, dim=-1)
        scores = (a.unsqueeze(-1) + b.unsqueeze(-2)).flatten(-2)
        names = (row.unsqueeze(-1) * self.keys + column.unsqueeze(-2)).flatten(-2)
        best, place = scores.topk(self.top_k, dim=-1)
        weights = best.softmax(-1)
        return weights if self.normalise is None else self.normalise(weights), names.gather(-1, place)
