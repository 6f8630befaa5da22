"""Cross entropy of the head, a chunk of tokens at a time so that the logits of a long batch never exist at once."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint


def _chunk_loss(x: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    logits = F.linear(x, weight)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return F.cross_entropy(logits, labels, reduction="sum", ignore_index=-100)


def summed_cross_entropy(x: Tensor, weight: Tensor, labels: Tensor, chunk: int | None = None) -> Tensor:
    """-sum log softmax(x weight^T)[label] over labels other than -100.

    x: [T, H], weight: [V, H], labels: [T] int64. Computed in float32 at least. With `chunk`, logits exist for that
    many tokens at a time and are recomputed in the backward pass: memory [chunk, V] instead of [T, V].
    """
    if chunk is None or x.shape[0] <= chunk:
        return _chunk_loss(x, weight, labels)
    parts = zip(x.split(chunk), labels.split(chunk), strict=True)
    losses = [checkpoint(_chunk_loss, part, weight, label, use_reentrant=False) for part, label in parts]
    return torch.stack([loss for loss in losses if loss is not None]).sum()
