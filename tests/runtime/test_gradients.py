"""Gradients of the global batch on meshes: accumulated, recomputed, of adapters and of everything, clipped and stepped.

Every rank has another number of trained tokens in every batch.
"""

import functools
import itertools

import handmade
import harness
import pytest
import ranks_gradients
import tiny

GRID = list(itertools.product(("full", "lora"), ("keep", "recompute"), (1, 3)))
IDS = [f"{mode}-{memory}-accumulate{accumulation}" for mode, memory, accumulation in GRID]


# Both optimizers, both modes, with and without recomputation and accumulation.
FAST = [("full", "recompute", 3), ("lora", "keep", 1)]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gradients")
    config = {"num_hidden_layers": 2, "num_experts": 8, "tokenizer": False}
    return handmade.write(tiny.make("mixtral", folder / "checkpoint", **config), folder / "package")


@pytest.fixture(scope="module")
def errors(package):
    """errors(case): those of a case on every rank; the fast ones are computed in one go, and the others too."""
    layouts = itertools.cycle([(2, 2, 2), (1, 4, 2), (1, 4, 4)])
    cases = [
        (next(layouts), "muon" if mode == "full" and accumulation == 3 else "adamw", mode == "lora",
         memory == "recompute", accumulation)
        for mode, memory, accumulation in GRID
    ]  # fmt: skip

    @functools.cache
    def computed(fast):
        chosen = [number for number, case in enumerate(GRID) if (case in FAST) == fast]
        ranks = harness.run(ranks_gradients.worst_errors, 4, package, [cases[n] for n in chosen], timeout=200)
        return [dict(zip(chosen, of_rank, strict=True)) for of_rank in ranks]

    return lambda case: [of_rank[case] for of_rank in computed(GRID[case] in FAST)]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [pytest.param(n, marks=() if case in FAST else pytest.mark.slow) for n, case in enumerate(GRID)],
    ids=IDS,
)
def test_a_step_equals_that_of_one_process(case, errors):
    for of_rank in errors(case):
        assert of_rank.keys() == {"gradients", "norm", "clipped", "step"}
        assert all(error <= 1e-9 for error in of_rank.values()), of_rank


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "case"),
    [
        (2, ((1, 2, 2), "muon", False, False, 3)),
        (2, ((2, 1, 1), "adamw", True, True, 1)),
        (8, ((2, 4, 4), "adamw", False, True, 3)),
        (8, ((1, 8, 4), "muon", False, False, 1)),
    ],
)
def test_a_step_on_other_numbers_of_ranks(world, case, package):
    """case: layout, optimizer, LoRA, recompute, accumulation."""
    for (errors,) in harness.run(ranks_gradients.worst_errors, world, package, [case], timeout=100):
        assert all(error <= 1e-9 for error in errors.values()), errors


def test_gradients_in_bfloat16_are_summed_in_float32(package):
    for found in harness.run(ranks_gradients.reduced, 2, package):
        assert found["float32"]
        assert found["wide"] <= 1e-6
        assert found["narrow"] > 1e-3  # what it would be otherwise
