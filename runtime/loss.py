"""Cross entropy of the head, a chunk of tokens at a time so that the logits of a long batch never exist at once."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


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

    x: [T, H], labels: [T] int64. Computed in float32 at least. With `chunk`, logits exist for that
    many tokens at a time and are recomputed in the backward pass: memory [chunk, V] instead of [T, V].
    """
    if chunk is None or x.shape[0] <= chunk:
        return _chunk_loss(x, head, labels)
    parts = zip(x.split(chunk), labels.split(chunk), strict=True)
    losses = [checkpoint(_chunk_loss, part, head, label, use_reentrant=False) for part, label in parts]
    return torch.stack([loss for loss in losses if loss is not None]).sum()
