"""Packed documents as batches: consecutive documents of one length are computed together, others one after another."""

from collections.abc import Iterable, Sequence
from itertools import groupby

import torch
from torch import Tensor


def runs_of(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """(documents, length) of every run of consecutive documents that are equally long; empty documents are left out."""
    return [(len(list(run)), length) for length, run in groupby(lengths) if length]


def unpack(x: Tensor, lengths: Sequence[int]) -> list[Tensor]:
    """x: [T, ...] -> for every run [B, S, ...]."""
    runs = runs_of(lengths)
    parts = x.split([count * length for count, length in runs])
    return [part.unflatten(0, run) for part, run in zip(parts, runs, strict=True)]


def pack(parts: Iterable[Tensor]) -> Tensor:
    """The inverse of `unpack`. Raises RuntimeError if there is no part."""
    return torch.cat([part.flatten(0, 1) for part in parts])
