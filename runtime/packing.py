"""Whole documents packed into batches of a fixed token budget, the same on every rank and after every restart."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from dayzero.runtime.data import Example
from dayzero.runtime.errors import InputError

OPEN_BINS = 1024  # first fit looks at this many of the latest bins, so that packing takes linear time


@dataclass(frozen=True)
class Batch:
    """What one rank sees in one step. ids, labels: [T] int64; cu_seqlens: [documents + 1] int64, 0 first, T last."""

    ids: Tensor
    labels: Tensor
    cu_seqlens: Tensor


class Packer:
    """Batches of at most `tokens_per_rank` tokens, one a rank and step, of whole documents.

    Each epoch has its own order, drawn from (seed, epoch), and holds every example exactly once. All epochs have
    `steps_per_epoch` steps. The batches of one step are close in size. `batch` is a function of its arguments alone.
    """

    def __init__(self, examples: Sequence[Example], tokens_per_rank: int, ranks: int, seed: int):
        """Raises InputError without examples, or for one that is longer than a batch."""
        self.examples, self.tokens_per_rank, self.ranks, self.seed = examples, tokens_per_rank, ranks, seed
        self.lengths = np.array([len(example.ids) for example in examples], dtype=np.int64)
        if not len(examples):
            raise InputError("training data", found="no examples", expected="at least one")
        if self.lengths.max() > tokens_per_rank:
            raise InputError(
                f"example {self.lengths.argmax()}",
                found=f"{self.lengths.max()} tokens",
                expected=f"at most the {tokens_per_rank} tokens of a batch",
                hint="Raise the tokens per device, or lower the maximal length.",
            )
        by_size, by_chance = (_first_fit(order, self.lengths, tokens_per_rank) for order in self._orders(0))
        self.steps_per_epoch = -(-max(len(by_size), len(by_chance)) // ranks)
        self._epoch = functools.lru_cache(maxsize=2)(self._pack)

    def batch(self, step: int, rank: int) -> Batch:
        """The batch of `rank` in `step`, counted from 0 over all epochs. It may be empty in a small data set."""
        epoch, step = divmod(step, self.steps_per_epoch)
        chosen = [self.examples[i] for i in self._epoch(epoch)[step][rank]]
        ids = [token for example in chosen for token in example.ids]
        labels = [label for example in chosen for label in example.labels]
        ends = np.cumsum([0] + [len(example.ids) for example in chosen])
        return Batch(
            torch.tensor(ids, dtype=torch.int64),
            torch.tensor(labels, dtype=torch.int64),
            torch.tensor(ends, dtype=torch.int64),
        )

    def _orders(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """(longest first, as drawn). The first packs best, and into equally many bins whatever the epoch."""
        drawn = np.random.default_rng((self.seed, epoch)).permutation(len(self.lengths))
        return drawn[np.argsort(-self.lengths[drawn], kind="stable")], drawn

    def _pack(self, epoch: int) -> list[list[list[int]]]:
        """Example indices by step and rank."""
        by_size, by_chance = self._orders(epoch)
        wanted = self.steps_per_epoch * self.ranks
        bins = _first_fit(by_chance, self.lengths, self.tokens_per_rank)
        if len(bins) > wanted:  # an unlucky order
            bins = _first_fit(by_size, self.lengths, self.tokens_per_rank)
        bins += [[] for _ in range(wanted - len(bins))]
        _fill_empty(bins)
        # Neighbours in size share a step, so that no rank waits long for another.
        bins.sort(key=lambda bin: -int(self.lengths[bin].sum()))
        steps = [bins[first : first + self.ranks] for first in range(0, wanted, self.ranks)]
        shuffle = np.random.default_rng((self.seed, epoch, 1))
        return [[steps[i][rank] for rank in shuffle.permutation(self.ranks)] for i in shuffle.permutation(len(steps))]


def _first_fit(order: np.ndarray, lengths: np.ndarray, capacity: int) -> list[list[int]]:
    """Each document into the first of the open bins that has room for it, else into a new one."""
    free = np.full(len(order), capacity)
    bins: list[list[int]] = []
    for i in order:
        start = max(0, len(bins) - OPEN_BINS)
        fits = free[start : len(bins)] >= lengths[i]
        place = start + int(fits.argmax()) if fits.any() else len(bins)
        if place == len(bins):
            bins.append([])
        bins[place].append(int(i))
        free[place] -= lengths[i]
    return bins


def _fill_empty(bins: list[list[int]]) -> None:
    """Halves the bins with most documents until none is empty or none has two."""
    for empty in (bin for bin in bins if not bin):
        donor = max(bins, key=len)
        keep = (len(donor) + 1) // 2
        empty += donor[keep:]
        del donor[keep:]
