"""Every mesh gives the loss, the gradients and the norm of one process."""

import functools

import handmade
import harness
import pytest
import ranks
import tiny
import torch
from split_models import by_world, model_results

from dayzero.runtime.package import load_package


@pytest.fixture(scope="module")
def packages(tmp_path_factory):
    folder = tmp_path_factory.mktemp("packages")
    made = {}
    for name, family, config in (
        ("mixtral", "mixtral", {"num_hidden_layers": 2}),
        ("qwen", "qwen3_moe", {"num_hidden_layers": 2, "num_experts": 8, "norm_topk_prob": False}),
        ("tied", "mixtral", {"num_hidden_layers": 2, "tie_word_embeddings": True}),
        ("few", "mixtral", {"num_hidden_layers": 2, "num_experts": 3}),
        ("top1", "mixtral", {"num_hidden_layers": 2, "num_experts_per_tok": 1}),
    ):
        checkpoint = tiny.make(family, folder / f"{name}-checkpoint", tokenizer=False, **config)
        made[name] = handmade.write(checkpoint, folder / name)
    return made


CASES = {
    "ep2-efsdp2": ("mixtral", (1, 4, 2), {}),
    "ep1": ("mixtral", (1, 4, 1), {}),
    "ep4": ("qwen", (1, 4, 4), {}),
    "replicate2-ep2": ("qwen", (2, 2, 2), {}),
    "replicate2-ep1": ("mixtral", (2, 2, 1), {}),
    "replicate4-ep4": ("qwen", (4, 1, 4), {}),
    "fewer-rows-than-shards": ("few", (1, 4, 1), {}),
    "expert-without-tokens": ("mixtral", (1, 4, 2), {"pushes": {3: -20.0}}),
    "rank-without-tokens": ("mixtral", (1, 4, 2), {"pushes": {0: 20.0, 1: 20.0}}),
    "all-to-one-expert": ("top1", (1, 4, 2), {"pushes": {4: 20.0}}),
    "recompute": ("qwen", (1, 4, 2), {"recomputed": True}),
    "recompute-rank-without-tokens": ("mixtral", (1, 4, 2), {"recomputed": True, "pushes": {0: 20.0, 1: 20.0}}),
    "tied": ("tied", (1, 4, 2), {}),
    "accumulate3": ("mixtral", (1, 4, 2), {"accumulation": 3}),
    "lora": ("qwen", (1, 4, 2), {"lora": True}),
    "lora-recompute-accumulate": ("mixtral", (2, 2, 2), {"lora": True, "recomputed": True, "accumulation": 2}),
    "float32": ("mixtral", (1, 4, 2), {"dtype": torch.float32}),
}


FAST = [
    "ep2-efsdp2", "replicate2-ep1", "fewer-rows-than-shards", "rank-without-tokens", "recompute",
    "lora-recompute-accumulate",
]  # fmt: skip


@pytest.fixture(scope="module")
def errors(packages):
    """errors(name): those of a case on every rank. Most of a small case is the start of processes: the fast ones are
    computed in one go, and the others too."""

    @functools.cache
    def computed(fast):
        cases = {
            name: (packages[package], {"layout": layout, **case})
            for name, (package, layout, case) in CASES.items()
            if (name in FAST) == fast
        }
        return harness.run(ranks.expert_parallel, 4, cases, timeout=200)

    return lambda name: [of_rank[name] for of_rank in computed(name in FAST)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_equals_one_process(name, errors):
    case = CASES[name][2]
    tolerance = 2e-6 if case.get("dtype") == torch.float32 else 1e-9
    for result in errors(name):
        assert result["loss"] <= tolerance
        assert result["gradients"] <= tolerance, result["where"]
        assert result["norm"] <= tolerance
        assert result["counted alike"]
        for layer in result["counts"]:
            for expert, push in case.get("pushes", {}).items():
                assert layer[expert] == (0 if push < 0 else sum(layer) // len(case["pushes"]))


# The same on other numbers of ranks; padded: each rank's rows as long as its longest.
WORLDS = {
    2: {
        "shard2": ("mixtral", (1, 2, 1), {"recomputed": True}),
        "ep2": ("qwen", (1, 2, 2), {"accumulation": 3}),
        "replicate2": ("mixtral", (2, 1, 1), {"chunk": 5}),
        "padded": ("qwen", (1, 2, 2), {"pad": True, "accumulation": 3}),
        "lora-padded": ("qwen", (2, 1, 2), {"lora": True, "pad": True, "recomputed": True}),
    },
    8: {
        "ep4-efsdp2": ("qwen", (1, 8, 4), {"recomputed": True}),
        "replicate2-ep2": ("mixtral", (2, 4, 2), {"accumulation": 3, "pad": True}),
        "ep1": ("qwen", (1, 8, 1), {}),
        "expert-without-tokens": ("mixtral", (1, 8, 2), {"pushes": {3: -20.0}}),
        "all-to-one-expert": ("top1", (1, 8, 2), {"pushes": {4: 20.0}}),
        "tp2-cp2": ("qwen", (2, 1, 4, 2, 2), {"recomputed": True}),
        "lora": ("qwen", (2, 4, 4), {"lora": True, "recomputed": True, "accumulation": 3}),
    },
}


@pytest.fixture(scope="module")
def on_worlds(packages):
    return model_results(packages, WORLDS)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "name"), by_world(WORLDS))
def test_equals_one_process_on_any_number_of_ranks(world, name, on_worlds):
    padded = WORLDS[world][name][2].get("pad", False)
    for result in (of_rank[name] for of_rank in on_worlds(world)):
        assert result["loss"] <= 1e-9
        assert result["gradients"] <= 1e-9, result["where"]
        assert result["norm"] <= 1e-9
        assert result["counted alike"] != padded  # padding has experts too, of no weight


def test_each_rank_reads_its_own_bytes(errors, packages):
    total = load_package(packages["mixtral"]).spec.checkpoint.bytes
    assert sum(of_rank["read"] for of_rank in errors("ep2-efsdp2")) == total
    assert all(0.2 * total < of_rank["read"] < 0.3 * total for of_rank in errors("ep2-efsdp2"))
    replicated = sum(of_rank["read"] for of_rank in errors("replicate2-ep1"))
    assert total < replicated < 2 * total  # dense parameters twice, experts once


def test_few_experts_are_sliced_and_many_are_dealt_out(errors):
    sliced, dealt = (set(errors(name)[0]["placements"].values()) for name in ("ep2-efsdp2", "recompute"))
    assert sliced == {"(Shard(dim=1), Shard(dim=0))"}  # efsdp 2 over 3 experts of a rank, ep
    assert dealt == {"(_StridedShard(dim=0, sf=2), Shard(dim=0))"}  # over 4
