"""The router: which experts see a token, and with what weight (Shazeer et al. 2017, arXiv:1701.06538)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .context import Context
from .norm import RMSNorm
from .router_losses import RouterLosses
from .selected_product import selected_product
from .selection import GroupLimit, Normalise

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]


class Routing(nn.Module):
    """What every router is: x [T, H] -> weights [T, K] in float32 at least, and expert index [T, K] int64.

    experts: how many classes it chooses from; the mixture knows what classes beyond its experts mean.
    shared: shared experts that it weighs too; their weights are further columns of `weights`.
    """

    experts: int
    top_k: int
    shared: int = 0

    @property
    def choices(self) -> int:
        """The classes that a token's top_k are taken from: all, unless some can never be chosen."""
        return self.experts


class Router(Routing):
    """One matrix, a score, the best K.

    logits = W norm(x) input_scale (+ logit_bias) * logit_scale, then softcap tanh(logits / softcap) where one is given.
    scored: the score is taken of all logits before the selection ("all"), or of the selected ones after it
    ("selected"). selection_bias: a bias that is added for the selection only and that no optimizer sees
    (Wang et al. 2024, arXiv:2408.15664): a buffer in float32. limit: see GroupLimit.
    The weights are the selected scores, normalised, then times scale, and times each expert's own scale where
    expert_scale.
    losses: what balancing adds to training, set by it; not in evaluation.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        score: Score = "softmax",
        scored: Literal["all", "selected"] = "all",
        logit_bias: bool = False,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        selection_bias: bool = False,
        limit: GroupLimit | None = None,
        normalise: Normalise | None = None,
        scale: float = 1.0,
        expert_scale: bool = False,
        norm: RMSNorm | None = None,
        input_scale: float = 1.0,
    ):
        super().__init__()
        self.experts, self.top_k, self.scored = experts, top_k, scored
        self.score: Score = score
        self.logit_scale, self.logit_softcap, self.scale, self.input_scale = (
            logit_scale,
            logit_softcap,
            scale,
            input_scale,
        )
        self.limit, self.normalise, self.norm = limit, normalise, norm
        self.weight = nn.Parameter(torch.empty(experts, hidden))
        self.logit_bias = nn.Parameter(torch.empty(experts)) if logit_bias else None
        self.expert_scale = nn.Parameter(torch.empty(experts)) if expert_scale else None
        self.selection_bias: Tensor | None
        self.register_buffer("selection_bias", torch.empty(experts, dtype=torch.float32) if selection_bias else None)
        self.losses: RouterLosses | None = None

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)
        for zero in (self.logit_bias, self.selection_bias):
            if zero is not None:
                nn.init.zeros_(zero)
        if self.expert_scale is not None:
            nn.init.ones_(self.expert_scale)

    def forward(self, x: Tensor, context: Context | None = None) -> tuple[Tensor, Tensor]:
        x = self._into(x)
        losses = self.losses if self.training else None
        # All logits have gradients only where something asks for all of them.
        only_selected = losses is None and self._weighs_selected_only() and torch.is_grad_enabled()
        with torch.set_grad_enabled(torch.is_grad_enabled() and not only_selected):
            product = linear(x, self.weight)
            logits = self._out_of(product, self.logit_bias)
            scores = scored_by(self.score, logits) if self.scored == "all" else logits
            index = self.select(scores, context)
        if only_selected:
            bias = None if self.logit_bias is None else self.logit_bias[index]
            logits = self._out_of(selected_product(x, self.weight.to(x.dtype), product, index), bias)
            weights = scored_by(self.score, logits)
        else:
            weights = scores.gather(-1, index)
            if self.scored == "selected":
                weights = scored_by(self.score, weights)
        if self.normalise is not None:
            weights = self.normalise(weights)
        if self.scale != 1.0:
            weights = weights * self.scale
        if self.expert_scale is not None:
            weights = weights * self.expert_scale.to(weights.dtype)[index]
        if losses is not None:
            weights = self._with_losses(losses, weights, logits, scores, index, context)
        return weights, index

    def _weighs_selected_only(self) -> bool:
        """Whether the weights are a function of the selected logits.

        They are where each has a score of its own; and a softmax over all, divided by the sum of the selected, is the
        softmax over those: what the others add to its denominator cancels.
        """
        return self.scored == "selected" or self.score != "softmax" or self._is_plain(self.normalise)

    @staticmethod
    def _is_plain(normalise: Normalise | None) -> bool:
        return normalise is not None and (normalise.eps, normalise.minimum, normalise.order) == (0.0, None, 1.0)

    def _with_losses(
        self,
        losses: RouterLosses,
        weights: Tensor,
        logits: Tensor,
        scores: Tensor,
        index: Tensor,
        context: Context | None,
    ) -> Tensor:
        chances = scores / scores.sum(-1, keepdim=True) if self.scored == "all" else logits.softmax(-1)
        biased = scores if self.selection_bias is None else scores + self.selection_bias
        lengths = (index.shape[0],) if context is None else context.lengths
        return losses.attach(weights, logits, chances, biased, index, lengths)

    def _into(self, x: Tensor) -> Tensor:
        """What the matrix is applied to, in float32 at least."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.norm is not None:
            x = self.norm(x)
        return x if self.input_scale == 1.0 else x * self.input_scale

    def _out_of(self, product: Tensor, bias: Tensor | None) -> Tensor:
        """Logits of the matrix's product, of all experts or of the selected."""
        logits = product if bias is None else product + bias.to(product.dtype)
        if self.logit_scale != 1.0:
            logits = logits * self.logit_scale
        if self.logit_softcap is not None:
            logits = torch.tanh(logits / self.logit_softcap) * self.logit_softcap
        return logits

    def select(self, scores: Tensor, context: Context | None) -> Tensor:
        """[T, K]: the experts of the highest scores, bias included."""
        if self.selection_bias is not None:
            scores = scores + self.selection_bias
        if self.limit is not None:
            scores = self.limit(scores)
        return torch.topk(scores, self.top_k, dim=-1).indices


def scored_by(score: Score, logits: Tensor) -> Tensor:
    match score:
        case "softmax":
            return logits.softmax(-1)
        case "sigmoid":
            return logits.sigmoid()
        case "sqrtsoftplus":
            return F.softplus(logits).sqrt()


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """W x + b in the dtype of x."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))
