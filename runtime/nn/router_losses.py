"""Losses that keep a router even, or its logits small, beside the loss of the model; and what quantile balancing needs.

All are sums over tokens divided by the tokens of the whole step, over all ranks and batches, so that no factor depends
on the mesh. p is a token's scores over their sum, f_e = E / (K T) * copies of expert e.

    auxiliary   sum_e f_e mean_t p_te, f over the batches of all ranks (Fedus et al. 2021, arXiv:2101.03961)
    sequence    the same for each document by itself (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2)
    z           mean_t logsumexp(logits_t)^2 (Zoph et al. 2022, arXiv:2202.08906)
"""

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from dayzero.runtime.recompute import computed_again

from .cut import Cut

if TYPE_CHECKING:
    from dayzero.runtime.split import Split

# Edges of the bins in which margins are counted: 8 to an octave, on both sides of 0.
_OCTAVES, _STEPS = (-20, 3), 8
_POSITIVE = [2.0 ** (n / _STEPS) for n in range(_OCTAVES[0] * _STEPS, _OCTAVES[1] * _STEPS + 1)]
EDGES = [-edge for edge in reversed(_POSITIVE)] + _POSITIVE


@dataclass
class RouterLosses:
    """auxiliary, sequence, z: what each loss is multiplied by; 0 for none. group: the ranks whose batches are one.
    split: how ranks share a batch, where they do; each has the losses of its own tokens then.

    tokens: of the step, set before it. values: each loss, of this rank's tokens. margins [E, bins] int64, if
    count_margins: by how much an expert's score missed the selection (positive) or exceeded what was needed (negative).
    Both since they were last taken, summed over forward passes, without what is computed again.
    """

    auxiliary: float = 0.0
    sequence: float = 0.0
    z: float = 0.0
    count_margins: bool = False
    group: ProcessGroup | None = None
    split: "Split | None" = None
    tokens: int = 1
    values: dict[str, Tensor] = field(default_factory=dict)
    margins: Tensor | None = None

    def attach(
        self,
        weights: Tensor,
        logits: Tensor,
        chances: Tensor,
        selected: Tensor,
        index: Tensor,
        lengths: tuple[int, ...],
    ) -> Tensor:
        """weights, whose gradient brings that of the losses with it.

        logits [T, E]; chances [T, E]: p; selected [T, E]: the scores, bias included, that the selection went by;
        index [T, K]; lengths: of the documents, of all ranks of tp where these share them.
        """
        losses = {}
        if self.auxiliary:
            copies, total = self._copies(index, logits.shape[1])
            losses["auxiliary"] = self.auxiliary * logits.shape[1] * (chances.sum(0) * copies / total).sum()
        if self.sequence:
            losses["sequence"] = self.sequence * self._by_document(chances, index, lengths)
        if self.z:
            losses["z"] = self.z * logits.logsumexp(-1).square().sum()
        losses = {name: loss / self.tokens for name, loss in losses.items()}
        if not computed_again():
            for name, loss in losses.items():
                self.values[name] = self.values.get(name, 0) + loss.detach()
            if self.count_margins:
                margins = count_margins(selected.detach(), index)
                self.margins = margins if self.margins is None else self.margins + margins
        return _Attach.apply(weights, sum(losses.values())) if losses else weights

    def take(self) -> tuple[dict[str, Tensor], Tensor | None]:
        """(values, margins), which begin anew."""
        taken = self.values, self.margins
        self.values, self.margins = {}, None
        return taken

    def _copies(self, index: Tensor, experts: int) -> tuple[Tensor, Tensor]:
        """Copies of each expert and of all, over the group."""
        counts = torch.bincount(index.flatten(), minlength=experts)
        if self.group is not None:
            dist.all_reduce(counts, group=self.group)
        return counts, counts.sum().clamp(min=1)

    def _by_document(self, chances: Tensor, index: Tensor, lengths: tuple[int, ...]) -> Tensor:
        """sum over documents of their tokens times E/(K T_s) * sum_e copies_se * mean_t p_te, t of this rank."""
        whole = lengths.whole if isinstance(lengths, Cut) else lengths
        experts, documents = chances.shape[1], len(whole)
        sizes = torch.tensor(whole, device=index.device)
        document = torch.arange(documents, device=index.device).repeat_interleave(sizes, output_size=sum(whole))
        if self.split is not None:
            document = self.split.own(document)
        copies = torch.bincount((document.unsqueeze(1) * experts + index).flatten(), minlength=documents * experts)
        for group in (self.split.tp, self.split.cp) if self.split is not None else ():
            if group is not None:
                dist.all_reduce(copies, group=group)
        nothing = torch.zeros(documents, experts, dtype=chances.dtype, device=chances.device)
        share = copies.view(documents, experts).to(chances.dtype) / (index.shape[1] * sizes.clamp(min=1)).unsqueeze(1)
        return experts * (share * nothing.index_add(0, document, chances)).sum()


def count_margins(selected: Tensor, index: Tensor) -> Tensor:
    """[E, len(EDGES) + 1] int64: for how many tokens an expert's margin lies in each bin.

    The margin is the score that the selection asks of an expert, were the other experts as they are, less its own.
    """
    top_k, experts = index.shape[1], selected.shape[1]
    best = selected.topk(min(top_k + 1, experts), dim=-1).values
    chosen = torch.zeros_like(selected, dtype=torch.bool).scatter_(1, index, True)
    needed = torch.where(chosen, best[:, -1:], best[:, top_k - 1 : top_k])
    edges = torch.tensor(EDGES, dtype=selected.dtype, device=selected.device)
    bins = torch.bucketize(needed - selected, edges)
    bins = bins + torch.arange(experts, device=bins.device) * (len(EDGES) + 1)
    return torch.bincount(bins.flatten(), minlength=experts * (len(EDGES) + 1)).view(experts, -1)


def margin_quantile(margins: Tensor, share: float) -> Tensor:
    """[E] float64: the margin that `share` of the tokens do not exceed, to the middle of a bin."""
    running = margins.cumsum(1).double()
    place = (running < share * running[:, -1:]).sum(1).clamp(max=len(EDGES))
    edges = torch.tensor([-math.inf, *EDGES, math.inf], dtype=torch.float64, device=margins.device)
    low, high = edges[place], edges[place + 1]
    middle = (low + high) / 2
    return torch.where(middle.isfinite(), middle, torch.where(low.isfinite(), low, high))


class _Attach(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weights, loss):
        ctx.save_for_backward(loss)
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx, grad):
        (loss,) = ctx.saved_tensors
        return grad, torch.ones_like(loss)
