"""Packing: whole documents, each once an epoch, the same everywhere."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.runtime.data import NO_LOSS, Example
from dayzero.runtime.errors import InputError
from dayzero.runtime.packing import Packer

CAPACITY = 16
lengths = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=40)


def documents(lengths):
    """Document i repeats the token i; its labels are i as well, the first one untrained."""
    return [Example([i] * length, [NO_LOSS] + [i] * (length - 1)) for i, length in enumerate(lengths)]


@settings(max_examples=60, deadline=None)
@given(lengths, st.integers(1, 5), st.integers(0, 3), st.integers(0, 4))
def test_every_epoch_holds_every_document_once_and_whole(lengths, ranks, seed, epoch):
    packer = Packer(documents(lengths), CAPACITY, ranks, seed)
    seen = []
    for step in range(packer.steps_per_epoch * epoch, packer.steps_per_epoch * (epoch + 1)):
        for rank in range(ranks):
            batch = packer.batch(step, rank)
            bounds = batch.cu_seqlens.tolist()
            assert bounds[0] == 0
            assert bounds[-1] == len(batch.ids) == len(batch.labels) <= CAPACITY
            assert {batch.ids.dtype, batch.labels.dtype, batch.cu_seqlens.dtype} == {torch.int64}
            for start, end in itertools.pairwise(bounds):
                (document,) = set(batch.ids[start:end].tolist())
                assert batch.labels[start:end].tolist() == [NO_LOSS] + [document] * (end - start - 1)
                assert end - start == lengths[document]
                seen.append(document)
    assert sorted(seen) == list(range(len(lengths)))


@settings(max_examples=30, deadline=None)
@given(lengths, st.integers(1, 4), st.integers(0, 3))
def test_batches_depend_on_step_and_rank_alone(lengths, ranks, seed):
    first, second = (Packer(documents(lengths), CAPACITY, ranks, seed) for _ in range(2))
    calls = [(step, rank) for step in range(3 * first.steps_per_epoch) for rank in range(ranks)]
    forward = {call: first.batch(*call) for call in calls}
    for call in reversed(calls):
        again = second.batch(*call)
        assert torch.equal(forward[call].ids, again.ids)
        assert torch.equal(forward[call].cu_seqlens, again.cu_seqlens)


@settings(max_examples=30, deadline=None)
@given(lengths, st.integers(1, 5))
def test_a_rank_is_idle_only_where_no_document_can_be_spared(lengths, ranks):
    packer = Packer(documents(lengths), CAPACITY, ranks, 0)
    batches = [packer.batch(step, rank) for step in range(packer.steps_per_epoch) for rank in range(ranks)]
    counts = [len(batch.cu_seqlens) - 1 for batch in batches]
    assert min(counts) > 0 or max(counts) == 1


def test_epochs_and_seeds_differ():
    packer = Packer(documents([3, 5, 7, 2] * 20), CAPACITY, 2, 0)
    other = Packer(documents([3, 5, 7, 2] * 20), CAPACITY, 2, 1)
    epoch = packer.steps_per_epoch
    assert packer.batch(0, 0).ids.tolist() != packer.batch(epoch, 0).ids.tolist()
    assert packer.batch(0, 0).ids.tolist() != other.batch(0, 0).ids.tolist()


def test_batches_are_full_and_balanced():
    generator = torch.Generator().manual_seed(0)
    lengths = torch.randint(20, 800, (3000,), generator=generator).tolist()
    packer = Packer(documents(lengths), 4096, 8, 0)
    sizes = torch.tensor([[len(packer.batch(s, r).ids) for r in range(8)] for s in range(packer.steps_per_epoch)])
    assert sizes.sum() == sum(lengths)
    assert sizes.sum() / (4096 * sizes.numel()) > 0.95
    imbalance = (sizes.max(1).values - sizes.float().mean(1)) / 4096
    assert imbalance.sort().values[:-1].max() < 0.01  # all steps but the one with the left-overs


def test_a_hundred_thousand_documents_pack_in_seconds():
    example = Example([1], [1])
    packer = Packer([example] * 100_000, 64, 8, 0)
    assert packer.steps_per_epoch == -(-100_000 // (64 * 8))


def test_bad_input():
    with pytest.raises(InputError, match="no examples"):
        Packer([], 16, 1, 0)
    with pytest.raises(InputError, match="example 1") as error:
        Packer(documents([3, 17]), 16, 1, 0)
    assert "17 tokens" in str(error.value)
