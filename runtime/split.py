"""How the ranks that share a batch see it: over cp in consecutive parts, each of which is dealt out over tp."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from dayzero.runtime.loss import Head, summed_cross_entropy
from dayzero.runtime.nn.context import Context
from dayzero.runtime.nn.cut import Cut, cut
from dayzero.runtime.rows import Span, even_span, gather, summed_rows

if TYPE_CHECKING:
    from dayzero.runtime.nn import CausalLM


class Split:
    """tp, cp: the groups, None where there is one rank; together: of both, where there are both. vocabulary: the first
    token of this rank's part of embedding and head, None where it has all of them.

    The model is called with the whole batch on each of these ranks. It embeds the rank's own rows, and its loss is that
    of the rank's own rows: a sum over all ranks counts each token once.
    """

    def __init__(self, tp: ProcessGroup | None, cp: ProcessGroup | None, together: ProcessGroup | None = None):
        self.tp, self.cp = tp, cp
        self.together = together or cp or tp
        self.vocabulary: int | None = None
        self.begin(0)

    @property
    def sizes(self) -> tuple[int, int]:
        """Ranks of tp and of cp."""
        return tuple(1 if group is None else group.size() for group in (self.tp, self.cp))  # type: ignore[return-value]

    def begin(self, tokens: int) -> None:
        """The rows of a batch of so many tokens: `part` over cp, `rows` of that part over tp."""
        self.part = even_span(tokens, self.cp)
        self.rows = even_span(self.part.size, self.tp)

    def install(self, model: "CausalLM") -> None:
        model.split = self  # type: ignore[assignment]
        model.embed.forward = partial(self._embed, model, model.embed.forward)  # type: ignore[method-assign]

    def _embed(self, model: "CausalLM", forward: Callable[[Tensor], Tensor], ids: Tensor) -> Tensor:
        self.begin(ids.shape[0])
        ids = ids[self.part.own]
        if self.vocabulary is None:
            return forward(ids[self.rows.own])
        weight = _local(model.embed.weight)
        inside = (ids >= self.vocabulary) & (ids < self.vocabulary + weight.shape[0])
        found = F.embedding((ids - self.vocabulary).clamp(0, weight.shape[0] - 1), weight)
        return summed_rows(torch.where(inside[:, None], found, found.new_zeros(())), self.rows)

    def own(self, ids: Tensor) -> Tensor:
        """The rank's own rows of [T] of the whole batch."""
        return ids[self.part.own][self.rows.own]

    def context(self, context: Context) -> Context:
        """Of this rank's part."""
        if self.cp is None:
            return context
        from dayzero.runtime.context_parallel import part_of

        return part_of(context, self.part)

    def own_context(self, context: Context) -> Context:
        """Of this rank's rows, for what sees across all ranks that share the batch. context: of its part of them."""
        from dayzero.runtime.context_parallel import sliced

        lengths = context.lengths.whole if isinstance(context.lengths, Cut) else context.lengths
        sizes = tuple(size for part in self.part.sizes for size in _dealt_out(part, self.rows))
        place = self.part.index * len(self.rows.sizes) + self.rows.index
        return sliced(context, self.rows.own, cut(lengths, Span(self.together, sizes, place)))

    def logits(self, x: Tensor, head: Head) -> Tensor:
        """x: own rows -> [T, V] of the whole batch."""
        if self.vocabulary is None:
            found = gather(head.logits(x), self.rows)
        else:
            found = self._own_vocabulary(head).logits(gather(x, self.rows))
            columns = Span(self.rows.group, (found.shape[1],) * len(self.rows.sizes), self.rows.index)
            found = gather(found.t().contiguous(), columns).t()
            found = found if head.rows is None else found[:, : head.rows]
        return gather(found, self.part)

    def loss(self, x: Tensor, head: Head, labels: Tensor, chunk: int | None) -> Tensor:
        """x: own rows; labels: of the whole batch. The summed cross entropy of the own rows."""
        labels = labels[self.part.own]
        if self.vocabulary is None:
            return summed_cross_entropy(x, head, labels[self.rows.own], chunk)
        x, own = gather(x, self.rows), self._own_vocabulary(head)
        step = chunk or max(1, x.shape[0])
        many, losses = x.shape[0] > step, []
        for first in range(0, max(1, x.shape[0]), step):
            rows = slice(first, first + step)
            arguments = (x[rows], own, labels[rows], first, head.rows)
            losses.append(
                checkpoint(self._chunk_loss, *arguments, use_reentrant=False) if many else self._chunk_loss(*arguments)
            )
        return torch.stack([loss for loss in losses if loss is not None]).sum()

    def _own_vocabulary(self, head: Head) -> Head:
        bias = None if head.bias is None else _local(head.bias)
        return head._replace(weight=_local(head.weight), bias=bias, rows=None)

    def _chunk_loss(self, x: Tensor, head: Head, labels: Tensor, first: int, rows: int | None) -> Tensor:
        assert self.vocabulary is not None
        logits = head.logits(x)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if rows is not None:
            token = torch.arange(self.vocabulary, self.vocabulary + logits.shape[1], device=x.device)
            logits = logits.masked_fill(token >= rows, float("-inf"))
        ends = torch.tensor(self.rows.sizes, device=x.device).cumsum(0)
        place = torch.arange(first, first + x.shape[0], device=x.device)
        owner = torch.searchsorted(ends, place, right=True)
        return _VocabularyLoss.apply(logits, labels, self.vocabulary, owner, self.rows)  # type: ignore[no-any-return]


class _VocabularyLoss(torch.autograd.Function):
    """Summed cross entropy of the rows whose owner this rank is, over logits whose columns are cut.

    logits: [T, V / ranks]; labels: [T]; owner: [T], the rank that counts each row's loss.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor, first: int, owner: Tensor, span: Span) -> Tensor:
        top = logits.amax(-1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=span.group)
        shares = (logits - top[:, None]).exp_()
        place = labels - first
        inside = (place >= 0) & (place < logits.shape[1])
        place = place.clamp(0, logits.shape[1] - 1)
        chosen = torch.where(inside, logits.gather(-1, place[:, None])[:, 0], 0.0)
        sums = torch.stack([shares.sum(-1), chosen])
        dist.all_reduce(sums, group=span.group)
        total, chosen = sums
        shares /= total[:, None]
        ctx.save_for_backward(shares, labels, place, inside, owner)
        ctx.span = span
        counted = (labels != -100) & (owner == span.index)
        return torch.where(counted, total.log() + top - chosen, 0.0).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        shares, labels, place, inside, owner = ctx.saved_tensors
        grads = grad.new_empty(len(ctx.span.sizes))
        dist.all_gather_into_tensor(grads, grad.reshape(1), group=ctx.span.group)
        weight = torch.where(labels != -100, grads[owner], 0.0)
        out = shares * weight[:, None]
        out.scatter_add_(1, place[:, None], torch.where(inside, -weight, 0.0)[:, None])
        return out, None, None, None, None


def _dealt_out(rows: int, like: Span) -> tuple[int, ...]:
    """The sizes of `even_span` over as many ranks as `like` has."""
    ranks = len(like.sizes)
    return tuple(rows // ranks + (rank < rows % ranks) for rank in range(ranks))


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
