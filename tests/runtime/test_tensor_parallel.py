"""Blocks cut over ranks, and models of them, equal one process: outputs, every gradient, the norm."""

import inspect

import handmade
import harness
import pytest
import ranks_split
import split_cases
import tiny
import torch
from split_models import by_world, model_results

from dayzero.runtime.errors import InputError
from dayzero.runtime.nn import BLOCKS
from dayzero.runtime.tensor_parallel import check_alone, cuts_of

NEVER_CUT = {
    "indexed-attention-blocks", "convolution-residual", "mixture-joint", "mixture-hashed", "mixture-capacity",
    "mixture-carried", "mixture-product-keys", "mixture-of-attention", "attention-additions", "feed-forward-additions",
    "gated-layer-input", "attention-distance-bias", "attention-dynamic-mask",
}  # fmt: skip
UNTRIED = {
    "SelfGatedRMSNorm",
    "PooledIndexer",
    "MeanPooledIndexer",
    "Lifted",
    "LiftedRouter",
    "CrossAttention",  # a model with an encoder is refused
}  # none of which is ever cut


@pytest.fixture(scope="module")
def on_two():
    return harness.run(ranks_split.tensor_blocks, 2, list(split_cases.CASES), timeout=100)[0]


@pytest.mark.parametrize("name", split_cases.CASES)
def test_a_block_cut_in_two_equals_the_whole(name, on_two):
    result = on_two[name]
    assert result["output"] <= 1e-9
    assert result["input"] <= 1e-9
    assert result["parameters"] <= 1e-9, result["where"]
    # Each rank holds half of the weights that are cut: at least a quarter of all, unless the block says otherwise.
    assert (result["cut"] == 0) == (name in NEVER_CUT)
    assert result["cut"] <= result["whole"] / 2


def test_no_block_is_forgotten():
    """Whatever declares roles or reads a context has a case here, so that its roles have been tried."""
    tried = set()
    for name in split_cases.CASES:
        tried |= {type(module).__name__ for module in split_cases.build(name).modules()}
    asked = {name for name, block in BLOCKS.items() if _declares(block)}
    assert asked - tried == UNTRIED


def _declares(block: type) -> bool:
    return any(inspect.getattr_static(block, name, None) for name in ("parallel_roles", "uses_context"))


@pytest.mark.parametrize("over", ["tp", "cp"])
def test_what_layers_hand_on_and_are_handed_one_by_one(over):
    """Keys and values for later layers, an input of its own for every layer."""
    for errors in harness.run(ranks_split.whole_model, 2, "gemma4", (5, 9, 1, 4), over, timeout=60):
        assert {name: error for name, error in errors.items() if not error <= 1e-9} == {}


def test_fewer_tokens_and_groups_than_ranks():
    names = ["attention", "mamba2", "latent-indexer", "gated-feed-forward", "mixture", "lightning"]
    results = harness.run(ranks_split.tensor_blocks, 4, names, (2,), timeout=60)[0]
    for name, result in results.items():
        assert all(result[part] <= 1e-9 for part in ("output", "input", "parameters")), name


@pytest.mark.parametrize(
    ("name", "tp", "says"),
    [
        ("attention", 3, r"tp\n.*3\n.*4 heads of mixer \(GroupedQueryAttention\)\n.*\[1, 2, 4\]"),
        ("gated-feed-forward", 5, r"5\n.*dimension 0 of mixer.gate.weight \[12, 16\]\n.*\[1, 2, 3, 4, 6, 12\]"),
        ("recurrent-block", 4, "4\n.*2 heads"),
        ("gated-delta-net", 8, "8\n.*4 heads"),
    ],
)
def test_what_does_not_divide_is_refused_with_the_numbers(name, tp, says):
    with pytest.raises(InputError, match=says):
        cuts_of(split_cases.build(name), tp, "mixer")


@pytest.mark.parametrize(("tp", "cp"), [(2, 1), (1, 4)])
def test_a_model_with_an_encoder_is_refused_with_the_reason(tp, cp):
    model = torch.nn.Module()
    model.encoder = None
    check_alone(model, tp, cp)
    model.encoder = torch.nn.Linear(1, 1)
    check_alone(model, 1, 1)
    with pytest.raises(
        InputError, match=rf"tp and parallel.cp\n.*{tp} and {cp}\n.*look at the whole source.*\n.*dp_shard"
    ):
        check_alone(model, tp, cp)


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    made = {}
    for name, family, config in (
        ("odd", "mixtral", {}),
        ("qwen", "qwen3_moe", {"num_experts": 8, "norm_topk_prob": False, "vocab_size": 308}),
        ("tied", "mixtral", {"tie_word_embeddings": True, "vocab_size": 308}),
    ):
        checkpoint = tiny.make(family, folder / f"{name}-checkpoint", tokenizer=False, num_hidden_layers=2, **config)
        made[name] = handmade.write(checkpoint, folder / name)
    return made


# dp_replicate, dp_shard, ep, tp
CASES = {
    2: {
        "alone": ("qwen", (1, 1, 1, 2), {"recomputed": True}),
        "ep2": ("tied", (1, 1, 2, 2), {"accumulation": 3}),
        "vocabulary-does-not-divide": ("odd", (1, 1, 2, 2), {"chunk": 5}),
        "lora": ("qwen", (1, 1, 2, 2), {"lora": True, "recomputed": True, "chunk": 5}),
    },
    4: {
        "shard2": ("qwen", (1, 2, 1, 2), {"chunk": 4}),
        "shard2-ep2": ("tied", (1, 2, 2, 2), {"recomputed": True, "accumulation": 2}),
        "replicate2-ep4": ("qwen", (2, 1, 4, 2), {}),
        "tp4-ep4": ("qwen", (1, 1, 4, 4), {"recomputed": True}),
        "lora-shard2-ep2": ("odd", (1, 2, 2, 2), {"lora": True, "accumulation": 2}),
        "float32": ("qwen", (1, 2, 2, 2), {"dtype": torch.float32}),
    },
}


@pytest.fixture(scope="module")
def models(packages):
    """models(world): the results of every rank, computed once, all cases of a world in one go."""
    return model_results(packages, CASES)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), by_world(CASES))
def test_a_model_equals_one_process(world, name, models):
    tolerance = 2e-6 if "dtype" in CASES[world][name][2] else 1e-9
    for result in (of_rank[name] for of_rank in models(world)):
        assert result["loss"] <= tolerance
        assert result["gradients"] <= tolerance, result["where"]
        assert result["norm"] <= tolerance


def test_each_rank_reads_its_own_part_only(models):
    read = [of_rank["alone"]["read"] for of_rank in models(2)]
    assert max(read) <= 1.02 * min(read)
