"""No mutant survives: the ladder fails for every one, and names the module or the tensor that is wrong."""

import re

import pytest
from zoo import mutants
from zoo.mutants import climbed
from zoo.mutants_between import BETWEEN

MUTANTS = [*mutants.MUTANTS, *BETWEEN]

# One of each kind in the tests of every change; all of them in `make zoo`.
FEW = {
    "1 + w for w", "rotary form", "window by one", "not renormalised", "gate and up exchanged", "experts exchanged",
    "parallel for serial", "vanishing eps of the weights' sum", "correction bias in bfloat16", "A_log taken as A",
    "embedding scale in float32", "softcap dropped", "growth of queries handed to layers",
    "scale of the inputs of layers",
}  # fmt: skip


def test_the_mutants_are_many_and_apart():
    assert len(MUTANTS) >= 100
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.name for mutant in MUTANTS} >= FEW
    assert all((mutant.change is None) != (mutant.code is None) for mutant in MUTANTS)


@pytest.mark.parametrize("family", sorted({mutant.family for mutant in MUTANTS if mutant.name in FEW}))
def test_what_is_mutated_passes_as_it_is(family):
    assert climbed(family).verdict == "PASS"


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    [mutant if mutant.name in FEW else pytest.param(mutant, marks=pytest.mark.zoo) for mutant in MUTANTS],
    ids=lambda mutant: f"{mutant.family}: {mutant.name}",
)
def test_no_mutant_survives(mutant):
    before = climbed(mutant.family)
    assert before.verdict in {"PASS", "WARN"}, before.accused
    found = climbed(mutant.family, mutant)
    assert found.verdict in {"FAIL", "REFUSED"}
    named = found.by.get(mutant.rung, "") if mutant.rung else found.accused
    assert re.search(mutant.accused, named), found.accused
