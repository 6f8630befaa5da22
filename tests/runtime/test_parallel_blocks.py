"""Models of unusual blocks - recurrences, latent and selected attention, several streams, loops, what layers share - on
meshes: the loss, the gradients, the norm and the counts of one process."""

import functools

import harness
import odd_specs
import pytest
import ranks_blocks

DENSE = {"recurrent_gemma", "zamba"}
REFUSED = {  # no form whose tokens lie on several ranks, or 5 heads
    "deepseek_v4": "cp", "deepseek_v32": "cp", "mistral_large4": "cp", "kimi_linear": "tp",
}  # fmt: skip
FAST = {"jetmoe", ranks_blocks.LOOPED}
NAMES = sorted({*odd_specs.NAMES, ranks_blocks.LOOPED})


def cases_of(name):
    """Over two ranks: experts apart where there are any, recomputed and accumulated; and a batch shared by ranks.
    case -> (name, (dp_replicate, dp_shard, ep, tp, cp), settings)."""
    ep = 1 if name in DENSE else 2
    cases = {
        "apart": (name, (1, 2, ep), {"accumulation": 3}),
        "recomputed": (name, (1, 2, ep), {"recomputed": True, "pad": True}),
        "tp": (name, (1, 1, ep, 2), {"recomputed": True}),
        "cp": (name, (1, 1, ep, 1, 2), {}),
        "lora": (name, (1, 2, ep), {"lora": True}),
    }
    return {case: held for case, held in cases.items() if case != REFUSED.get(name)}


@pytest.fixture(scope="module")
def errors():
    """errors(name): of a model, by case, on every rank."""

    @functools.cache
    def computed(name):
        cases = cases_of(name)
        every = harness.run(ranks_blocks.compare, 2, list(cases.values()), timeout=120)
        return [dict(zip(cases, of_rank, strict=True)) for of_rank in every]

    return computed


LOSSES = {"auxiliary_loss": 0.5, "sequence_loss": 0.25, "z_loss": 0.125}


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 1, 2, 2), (1, 1, 1, 1, 2)], ids=["tp", "cp"])
def test_losses_of_routers_count_every_pass_and_every_token_once(layout):
    cases = [(name, layout, {**LOSSES, "recomputed": True, "accumulation": 3}) for name in sorted(FAST)]
    for of_rank in harness.run(ranks_blocks.compare, 2, cases, timeout=120):
        for found in of_rank:
            assert found["gradients"] <= 1e-9, found["where"]
            assert found["counted alike"]
            assert found["router losses"].keys() == {"auxiliary", "sequence", "z"}
            assert all(error <= 1e-9 for error in found["router losses"].values())


def test_a_looped_layer_counts_all_its_passes():
    (found,) = harness.run(ranks_blocks.compare, 1, [(ranks_blocks.LOOPED, (1, 1, 1), {"recomputed": True})])[0]
    assert found["counted alike"]
    assert [sum(counts) for counts in found["counts"]] == 2 * [2 * 14 * ranks_blocks.PASSES]  # top 2 of 14 tokens


@pytest.mark.slow
def test_everything_on_four_ranks():
    cases = [
        ("jetmoe", (1, 1, 2, 2, 2), {"recomputed": True}),
        ("looped", (1, 1, 4, 2, 2), {"recomputed": True, "accumulation": 3}),
        ("looped", (1, 2, 2, 2), {"lora": True}),
        ("jetmoe", (2, 1, 2, 1, 2), {"accumulation": 3}),
        ("qwen3_next", (2, 2, 2), {"recomputed": True}),
    ]
    for of_rank in harness.run(ranks_blocks.compare, 4, cases, timeout=120):
        for found in of_rank:
            assert all(found[part] <= 1e-9 for part in ("loss", "gradients", "norm")), found["where"]
            assert found["counted alike"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "case"),
    [
        pytest.param(name, case, marks=() if name in FAST else pytest.mark.slow)
        for name in NAMES
        for case in cases_of(name)
    ],
)
def test_equals_one_process(name, case, errors):
    for of_rank in errors(name):
        found = of_rank[case]
        assert found["loss"] <= 1e-9
        assert found["gradients"] <= 1e-9, found["where"]
        assert found["norm"] <= 1e-9
        assert bool(found["counts"]) == (name not in DENSE)
        assert found["counted alike"] == (case != "recomputed" or name in DENSE)  # there, padding has experts too
