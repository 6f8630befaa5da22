"""The loss that trains an indexer: attention's own distribution over keys is what its scores should give (DeepSeek
Sparse Attention, arXiv:2512.02556, section 2.1).

An indexer that runs several times in a forward pass, in layers that loop or parts that layers share, chooses keys for
another attention each time; its loss is the sum over them, as its gradient would be of any other loss.
"""

from collections.abc import Iterator, Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from dayzero.runtime.recompute import computed_again

from .documents import unpack
from .selected_attention import Indexer, causal, probabilities

Judged = Literal["all", "selected"]


def index_loss(
    scores: Sequence[Tensor],
    query: Tensor,
    key: Tensor,
    index: Tensor,
    lengths: Sequence[int],
    scale: float,
    indexer: Indexer,
    over: Judged,
) -> Tensor:
    """Sum over tokens (and groups of heads) of KL(p || softmax(scores)), a float32 scalar at least.

    p: attention weights without a selection, averaged over the group's heads, summed within each unit, and divided by
    their sum. over: all units that the indexer may choose from ("all", to warm an indexer up), or those it did choose.
    scores: for every run of documents [B, P, S, U], -inf where a unit of indexer.score_unit tokens is no candidate;
    query: [T, N, D]; key: [T, G, D]; index: [T, P, K], of units of indexer.unit tokens.
    """
    total = None
    unit = indexer.score_unit
    index = index.masked_fill(index < 0, -unit) * indexer.unit // unit
    documents = zip(scores, unpack(query, lengths), unpack(key, lengths), unpack(index, lengths), strict=True)
    for found, q, k, chosen in documents:
        length, units = q.shape[1], found.shape[-1]
        weights = probabilities(q.transpose(1, 2), k.transpose(1, 2), causal(length, None, q.device), scale)
        weights = weights.unflatten(1, (found.shape[1], -1)).mean(2)
        if unit > 1 or units != length:
            weights = torch.nn.functional.pad(weights, (0, units * unit - length))[..., : units * unit]
            weights = weights.unflatten(-1, (units, unit)).sum(-1)
        candidate = found > float("-inf")
        if over == "selected":
            picked = torch.zeros_like(candidate[..., :1]).expand(*candidate.shape[:-1], units + 1).contiguous()
            of_units = chosen.transpose(1, 2)
            picked.scatter_(-1, of_units.masked_fill((of_units < 0) | (of_units >= units), units), True)
            candidate = candidate & picked[..., :units]
        part = divergence(found, weights, candidate)
        total = part if total is None else total + part
    return total if total is not None else query.new_zeros(())


def divergence(scores: Tensor, weights: Tensor, candidate: Tensor) -> Tensor:
    """Sum of KL(weights / their sum || softmax(scores)) over the candidates of each row. All: [B, P, S, U]."""
    target = weights.masked_fill(~candidate, 0)
    mass = target.sum(-1, keepdim=True)
    target = target / mass.clamp_min(torch.finfo(mass.dtype).tiny)
    # A token without a candidate has nothing to learn from; softmax over nothing would be NaN.
    some = candidate.any(-1, keepdim=True)
    guess = scores.masked_fill(~candidate, float("-inf")).masked_fill(~some, 0).log_softmax(-1)
    terms = torch.xlogy(target, target) - target * guess.masked_fill(~candidate, 0)
    return terms.masked_fill(~some, 0).sum()


def train_indexers(model: nn.Module, over: Judged | None) -> int:
    """Makes every layer with an indexer compute its loss in the forward pass; None stops it. How many there are."""
    blocks = list(_indexed(model))
    for block in blocks:
        block.index_loss_over = over  # type: ignore[assignment]
        block.index_loss = None  # type: ignore[assignment]
    return len(blocks)


def freeze_indexers(model: nn.Module) -> None:
    """Without that loss nothing trains an indexer: what it chooses has no gradient."""
    for block in _indexed(model):
        block.indexer.requires_grad_(False)  # type: ignore[union-attr]


def add_loss(block: nn.Module, loss: Tensor) -> None:
    """Adds what a run of the block's indexer lost to what earlier runs did. Computed again in a backward pass, it has
    been added."""
    if not computed_again():
        block.index_loss = loss if block.index_loss is None else block.index_loss + loss  # type: ignore[assignment]


def index_losses(model: nn.Module) -> list[Tensor]:
    """The losses since they were last asked for, one for each layer that computed one: of one forward pass, summed over
    its tokens and over the times that a layer ran in it."""
    losses = []
    for block in _indexed(model):
        if isinstance(block.index_loss, Tensor):
            losses.append(block.index_loss)
        block.index_loss = None  # type: ignore[assignment]
    return losses


def _indexed(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.modules():
        if hasattr(module, "index_loss_over") and getattr(module, "indexer", None) is not None:
            yield module
