"""Cross entropy of the head, a chunk of tokens at a time so that the logits of a long batch never exist at once."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable


class Head(NamedTuple):
    """What makes logits of hidden states. weight: [V, H]; bias: [V] or None; scale, softcap and rows as in
    `CausalLM`."""

    weight: Tensor
    bias: Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None
    rows: int | None = None

    def logits(self, x: Tensor) -> Tensor:
        """x: [T, H] -> [T, V] in x's dtype."""
        logits = F.linear(x, self.weight, self.bias)
        if self.rows is not None:
            logits = logits[..., : self.rows]
        if self.scale != 1.0:
            logits = logits * self.scale
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def _chunk_loss(x: Tensor, head: Head, labels: Tensor) -> Tensor:
    logits = head.logits(x)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def summed_cross_entropy(x: Tensor, head: Head, labels: Tensor, chunk: int | None = None) -> Tensor:
    """-sum log softmax(logits)[label] over labels other than -100.

    x: [T, H], labels: [T] int64. Computed in float32 at least. With `chunk`, logits exist for that many tokens at a
    time: memory [chunk, V] instead of [T, V]. Their gradients are formed with them, since the gradient of a sum is
    known but for one factor, so that no product is computed twice (Hsu et al. 2024, arXiv:2410.10989).
    Rows without a label have no logits: of a prompt, nothing is computed.
    """
    if labels.device.type != "meta":
        labelled = (labels != -100).nonzero().squeeze(-1)
        if labelled.shape[0] < labels.shape[0]:
            x, labels = x.index_select(0, labelled), labels.index_select(0, labelled)
    if chunk is None or x.shape[0] <= chunk:
        return _chunk_loss(x, head, labels)
    if not torch.is_grad_enabled():
        parts = zip(x.split(chunk), labels.split(chunk), strict=True)
        return torch.stack([_chunk_loss(part, head, label) for part, label in parts]).sum()
    return _ChunkedLoss.apply(x, head.weight, head.bias, head, labels, chunk)  # type: ignore[no-any-return]


class _ChunkedLoss(torch.autograd.Function):
    """The loss of all chunks, and the gradients of x, weight and bias where they are wanted, in the forward pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, head: Head, labels: Tensor, chunk: int
    ) -> Tensor:
        wanted = ctx.needs_input_grad[:3]
        weight = weight.detach().requires_grad_(wanted[1])
        bias = None if bias is None else bias.detach().requires_grad_(wanted[2])
        # Sums over chunks are float32 at least, and their gradients of x stand side by side.
        sums = [
            torch.zeros_like(held, dtype=torch.promote_types(held.dtype, torch.float32)) if want else None
            for held, want in ((weight, wanted[1]), (bias, wanted[2]))
            if held is not None
        ]
        grad_x = torch.empty_like(x) if wanted[0] else None
        losses = []
        for first in range(0, x.shape[0], chunk):
            rows = slice(first, first + chunk)
            part = x[rows].detach().requires_grad_(wanted[0])
            with torch.enable_grad():
                loss = _chunk_loss(part, head._replace(weight=weight, bias=bias), labels[rows])
            inputs = [held for held in (part, weight, bias) if held is not None and held.requires_grad]
            grads = list(torch.autograd.grad(loss, inputs)) if inputs else []
            if grad_x is not None:
                grad_x[rows] = grads.pop(0)
            for total, grad in zip([total for total in sums if total is not None], grads, strict=True):
                total += grad
            losses.append(loss.detach())
        held = (part for part in (weight, bias) if part is not None)
        ctx.grads = [grad_x, *(s if s is None else s.to(part.dtype) for part, s in zip(held, sums, strict=True))]
        return torch.stack(losses).sum()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.grads is None:
            raise RuntimeError("the gradients of a loss in chunks are formed once; backward ran a second time")
        # In place: the gradient of a head is as large as a head.
        grads = [None if held is None else held.mul_(grad.to(held.dtype)) for held in ctx.grads]
        ctx.grads = None
        grad_x, grad_weight, grad_bias = grads + [None] * (3 - len(grads))
        return grad_x, grad_weight, grad_bias, None, None, None
