"""A limit on how many tokens an expert takes (Lepikhin et al. 2020, arXiv:2006.16668). Off unless asked for: it changes
what is learned."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .permutation import Compute, collect, spread


@dataclass(frozen=True)
class Capacity:
    """Of a rank's T tokens an expert takes at most ceil(factor * T * K / E) copies, those of the highest weights; the
    others are left out. pad: it always computes as many, rows of zeros where there are fewer: equal shapes for all."""

    factor: float
    pad: bool = False

    def of(self, tokens: int, choices: int, experts: int) -> int:
        return math.ceil(self.factor * tokens * choices / experts)


def within_capacity(index_TK: Tensor, weights_TK: Tensor, experts: int, capacity: int) -> Tensor:
    """[T, K]: the index, and 2^15 - 1 or more for copies over the capacity of their expert."""
    flat, nowhere = index_TK.flatten(), max(experts, 2**15 - 1)
    best_first = torch.argsort(weights_TK.detach().flatten(), descending=True, stable=True)
    order = best_first[torch.argsort(flat[best_first], stable=True)]
    counts = torch.bincount(flat, minlength=experts)
    expert = flat[order]
    place = torch.arange(flat.shape[0], device=flat.device) - (counts.cumsum(0) - counts)[expert]
    over = torch.zeros_like(flat, dtype=torch.bool)
    over[order] = (place >= capacity) & (expert < experts)
    return flat.masked_fill(over, nowhere).view_as(index_TK)


def padded(compute: Compute, height: int) -> Compute:
    """compute(x [M, H], counts [E]) with every expert's rows filled up to `height` with zeros."""

    def filled(x: Tensor, counts: Tensor) -> Tensor:
        experts = counts.shape[0]
        expert = torch.arange(experts, device=x.device).repeat_interleave(counts, output_size=x.shape[0])
        start = (counts.cumsum(0) - counts).index_select(0, expert)
        target = expert * height + torch.arange(x.shape[0], device=x.device) - start
        y = compute(collect(x, target, experts * height), torch.full_like(counts, height))
        return spread(y, target)

    return filled
