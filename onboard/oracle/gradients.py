"""Gradients of a reference, also of one that overwrites in place what its own backward pass needs.

Code such as `weights /= weights.sum()`, after a softmax that keeps its result for the backward pass, runs and cannot be
trained. What it computes has gradients all the same: autograd is then given copies of what is overwritten.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.autograd.graph import allow_mutation_on_saved_tensors

from dayzero.onboard.oracle.reference import run

Gradients = Callable[[Callable[[], Tensor], Sequence[Tensor], Tensor | None], tuple[Tensor, tuple[Tensor, ...]]]

_OVERWRITTEN = "modified by an inplace operation"  # in what torch says


def gradients(
    compute: Callable[[], Tensor], inputs: Sequence[Tensor], cotangent: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """(what `compute` gives, its gradient by each of the inputs, zero where it does not reach one).

    compute: called again where its code overwrites what the gradients need. cotangent: None for a scalar."""
    try:
        return as_trained(compute, inputs, cotangent)
    except RuntimeError as error:
        if _OVERWRITTEN not in str(error):
            raise
    with allow_mutation_on_saved_tensors():
        return as_trained(compute, inputs, cotangent)


def overwrites(model: nn.Module, ids: Tensor) -> str:
    """What the model overwrites although its gradients need it, for a report; "" for nothing. ids: [B, S]."""
    try:
        with torch.enable_grad():
            as_trained(lambda: run(model, ids).sum(), [one for one in model.parameters() if one.requires_grad])
    except RuntimeError as error:
        if _OVERWRITTEN not in str(error):
            raise
        what = str(error).partition(", which is ")[2].partition(", is at version")[0] or "a tensor"
        name = type(model).__name__
        return f"{name} overwrites {what}, which its backward pass needs, and fails in training: given a copy here"
    return ""


def as_trained(
    compute: Callable[[], Tensor], inputs: Sequence[Tensor], cotangent: Tensor | None = None
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The same as training would have it. Raises RuntimeError where the code overwrites what the gradients need."""
    output = compute()
    grads = torch.autograd.grad(output, list(inputs), cotangent, allow_unused=True, materialize_grads=True)
    return output.detach(), grads
