"""Blocks and models whose tokens lie on several ranks equal one process: loss, outputs, every gradient."""

import functools

import handmade
import harness
import pytest
import ranks_split
import split_cases
import tiny
import torch
from split_models import by_world, model_results

from dayzero.runtime.context_parallel import check_parts, part_of
from dayzero.runtime.errors import InputError
from dayzero.runtime.nn.cut import cut
from dayzero.runtime.rows import Span

REFUSED = {
    "attention-distance-bias": "DistanceBiasedAttention",
    "attention-dynamic-mask": "DynamicMaskAttention",
    "latent-indexer": "LatentAttention",
    "indexed-attention": "IndexedAttention",
    "indexed-attention-blocks": "IndexedAttention",
    "compressed-attention": "CompressedAttention",
    "compressed-attention-indexer": "CompressedAttention",
    "mixture-capacity": "TopOneRouter",
    "mixture-product-keys": "ProductKeyRouter",
}
POSSIBLE = [name for name in split_cases.CASES if name not in REFUSED]
# Cut inside a document and between two; one on all ranks; a token a rank; several chunks of every recurrence.
BATCHES = {2: [(5, 9, 1, 4), (19,)], 4: [(19,), (2, 1, 1), (11, 150, 3)]}


@pytest.fixture(scope="module")
def results():
    """results(world): errors of every block and length, computed once."""

    @functools.cache
    def on(world):
        return harness.run(ranks_split.context_blocks, world, POSSIBLE, BATCHES[world], timeout=100)[0]

    return on


@pytest.mark.parametrize("name", POSSIBLE)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_a_block_over_ranks_equals_one_process(world, name, results):
    for lengths in BATCHES[world]:
        result = results(world)[f"{name} {lengths}"]
        assert result["output"] <= 1e-9
        assert result["input"] <= 1e-9
        assert result["parameters"] <= 1e-9, result["where"]


@pytest.mark.parametrize("name", split_cases.CASES)
def test_blocks_without_such_a_form_are_refused_by_name(name):
    if name not in REFUSED:
        check_parts("layers.3.mixer", split_cases.build(name), 2)
        return
    with pytest.raises(InputError, match=rf"cp\n.*2\n.*1: {REFUSED[name]} of layers.3.mixer"):
        check_parts("layers.3.mixer", split_cases.build(name), 2)


def test_pieces_of_documents():
    spans = [Span(None, (4, 4, 3), rank) for rank in range(3)]
    parts = [cut((2, 7, 2), span) for span in spans]
    assert [tuple(part) for part in parts] == [(2, 2), (4,), (1, 2)]
    assert [part.before for part in parts] == [0, 2, 6]
    assert [parts[0].continued(rank) for rank in range(3)] == [False, True, True]
    assert [parts[0].last_is_first(rank) for rank in range(3)] == [False, True, False]
    context = split_cases.context_of((2, 7, 2))
    assert torch.cat([part_of(context, span).position for span in spans]).equal(context.position)
    assert part_of(context, spans[1]).position.tolist() == [2, 3, 4, 5]


def test_fewer_tokens_than_ranks_are_refused():
    with pytest.raises(ValueError, match="2 tokens are too few for the 3 ranks"):
        cut((2,), Span(None, (1, 1, 0), 0))


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    made = {}
    for name, family, config in (
        ("odd", "mixtral", {}),
        ("qwen", "qwen3_moe", {"num_experts": 8, "norm_topk_prob": False, "vocab_size": 308}),
    ):
        checkpoint = tiny.make(family, folder / f"{name}-checkpoint", tokenizer=False, num_hidden_layers=2, **config)
        made[name] = handmade.write(checkpoint, folder / name)
    return made


# dp_replicate, dp_shard, ep, tp, cp
CASES = {
    2: {
        "alone": ("odd", (1, 1, 1, 1, 2), {"recomputed": True}),
        "ep2": ("qwen", (1, 1, 2, 1, 2), {"accumulation": 3, "chunk": 4}),
        "lora": ("qwen", (1, 1, 2, 1, 2), {"lora": True, "recomputed": True}),
    },
    4: {
        "shard2-ep2": ("qwen", (1, 2, 2, 1, 2), {"recomputed": True}),
        "tp2-ep4": ("qwen", (1, 1, 4, 2, 2), {"chunk": 3, "recomputed": True}),
        "replicate2": ("odd", (2, 1, 2, 1, 2), {"accumulation": 2}),
        "cp4": ("odd", (1, 1, 2, 1, 4), {}),
        "lora-tp2": ("odd", (1, 1, 2, 2, 2), {"lora": True}),
    },
}


@pytest.fixture(scope="module")
def models(packages):
    """models(world): the results of every rank, computed once, all cases of a world in one go."""
    return model_results(packages, CASES)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), by_world(CASES))
def test_a_model_equals_one_process(world, name, models):
    for result in (of_rank[name] for of_rank in models(world)):
        assert result["loss"] <= 1e-9
        assert result["gradients"] <= 1e-9, result["where"]
        assert result["norm"] <= 1e-9
