"""What every layer of one forward pass shares: where documents begin, token positions, rotary tables."""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Context:
    """cu_seqlens: [documents + 1] int64, 0 first and T last. lengths: the same as Python integers.
    position: [T] int64, each token's place in its own document.
    cos, sin: [T, rotary dim] tables, None where the model has no rotary embedding.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    position: Tensor
    cos: Tensor | None = None
    sin: Tensor | None = None


def lengths_of(cu_seqlens: Tensor, tokens: int) -> tuple[int, ...]:
    """Document lengths as integers. Raises ValueError unless they cover exactly `tokens` tokens in order."""
    bounds = cu_seqlens.tolist()
    lengths = tuple(end - start for start, end in itertools.pairwise(bounds))
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens {bounds[:4]}...{bounds[-1:]} must rise from 0 to the {tokens} tokens of the batch"
        )
    return lengths


def positions_of(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """[T] int64: 0, 1, 2, ... restarting at every document."""
    parts = [torch.arange(length, device=device) for length in lengths]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)
