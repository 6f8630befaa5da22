"""The documents that a reference is proven on."""

import torch
from torch import Tensor, nn

from dayzero.onboard.oracle.reference import run

_APART = 1e-6  # relative: rounding that depends on the size of a batch stays far below


def documents(reference: nn.Module, vocabulary: int, length: int, generator: torch.Generator) -> Tensor:
    """Random token ids [B, length], every row a document.

    Two rows; one alone where the rows of a batch change one another in the reference, as they do where a router reads
    its logits across them: a document is then what a batch of one row is. Raises what the reference raises on them."""
    ids = torch.randint(3, vocabulary, (2, length), generator=generator)
    with torch.no_grad():
        together, alone = run(reference, ids)[:1], run(reference, ids[:1])
    apart = torch.linalg.vector_norm(together - alone) <= _APART * torch.linalg.vector_norm(alone)
    return ids if apart else ids[:1]
