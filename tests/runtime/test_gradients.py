"""Gradients of the global batch on meshes: accumulated, recomputed, of adapters and of everything, clipped and stepped.

Every rank has another number of trained tokens in every batch.
"""

import itertools

import handmade
import harness
import pytest
import ranks_gradients
import tiny

GRID = list(itertools.product(("full", "lora"), ("keep", "recompute"), (1, 3)))
IDS = [f"{mode}-{memory}-accumulate{accumulation}" for mode, memory, accumulation in GRID]


@pytest.fixture(scope="module")
def errors(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gradients")
    config = {"num_hidden_layers": 2, "num_experts": 8, "tokenizer": False}
    package = handmade.write(tiny.make("mixtral", folder / "checkpoint", **config), folder / "package")
    layouts = itertools.cycle([(2, 2, 2), (1, 4, 2), (1, 4, 4)])
    cases = [
        (next(layouts), "muon" if mode == "full" and accumulation == 3 else "adamw", mode == "lora",
         memory == "recompute", accumulation)
        for mode, memory, accumulation in GRID
    ]  # fmt: skip
    return harness.run(ranks_gradients.worst_errors, 4, package, cases, timeout=200)


@pytest.mark.parametrize("case", range(len(GRID)), ids=IDS)
def test_a_step_equals_that_of_one_process(case, errors):
    for of_rank in errors:
        assert of_rank[case].keys() == {"gradients", "norm", "clipped", "step"}
        assert max(of_rank[case].values()) <= 1e-9, of_rank[case]
