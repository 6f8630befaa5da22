"""No mutant survives: the ladder fails for every one, and names the module or the tensor that is wrong."""

import functools
import re

import pytest
from zoo.mutants import Climbed, Mutant, climbed, whole
from zoo.mutants_between import BETWEEN
from zoo.mutants_of_blocks import OF_BLOCKS

MUTANTS = [*OF_BLOCKS, *BETWEEN]

# One of each kind in the tests of every change; all of them in `make zoo`.
FEW = {
    "1 + w for w", "rotary form", "window by one", "not renormalised", "gate and up exchanged", "experts exchanged",
    "parallel for serial", "vanishing eps of the weights' sum", "correction bias in bfloat16", "A_log taken as A",
    "embedding scale in float32", "softcap dropped", "growth of queries handed to layers",
    "scale of the inputs of layers",
}  # fmt: skip


# A family whose package warns, and of what: a mutant must be accused of something else.
WARNED = {"nllb_moe": r"^(model\.(en|de)coder\.layers\.1\.ffn: the reference contradicts itself: [^;]*(; |$))+$"}


@functools.cache
def as_it_is(family):
    """The family's package without a mutation."""
    return climbed(family)


def assert_that_nothing_is_accused_before(mutant):
    """Of the package as it is no rung fails, and what one warns of is not what the mutant is accused of: it is the
    mutation that is found."""
    before = as_it_is(mutant.family)
    assert before.verdict == ("WARN" if mutant.family in WARNED else "PASS"), before.accused
    assert re.search(WARNED.get(mutant.family, "^$"), before.warned), before.warned
    assert not re.search(mutant.accused, before.warned), before.warned


def test_the_mutants_are_many_and_apart():
    assert len(MUTANTS) >= 100
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
    assert {mutant.name for mutant in MUTANTS} >= FEW
    assert all((mutant.change is None) != (mutant.code is None) for mutant in MUTANTS)


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted({mutant.family for mutant in MUTANTS if mutant.name in FEW}))
def test_what_is_mutated_passes_as_it_is(family):
    assert as_it_is(family).verdict == "PASS"


def test_what_was_accused_before_the_mutation_is_no_finding(monkeypatch):
    """Whether the package fails, or warns of what it should not, or of the very thing that a mutant changes."""
    warns = "model.decoder.layers.1.ffn: the reference contradicts itself: of its router"
    for mutant, before in [
        (Mutant("x", "mixtral", r"layers\.0\.ffn", whole()), Climbed("FAIL", "layers.0.ffn misses")),
        (Mutant("x", "mixtral", r"layers\.0\.ffn", whole()), Climbed("WARN", "", warned=warns)),
        (Mutant("x", "nllb_moe", r"positions, for", whole()), Climbed("WARN", "", warned="positions, for model.embed")),
        (Mutant("x", "nllb_moe", r"layers\.1\.ffn", whole()), Climbed("WARN", "", warned=warns)),
    ]:
        monkeypatch.setitem(globals(), "as_it_is", lambda family, before=before: before)
        with pytest.raises(AssertionError):
            assert_that_nothing_is_accused_before(mutant)
    mutant = Mutant("x", "nllb_moe", r"positions, for", whole())
    assert_that_nothing_is_accused_before(mutant)


@pytest.mark.slow
@pytest.mark.parametrize(
    "mutant",
    [mutant if mutant.name in FEW else pytest.param(mutant, marks=pytest.mark.zoo) for mutant in MUTANTS],
    ids=lambda mutant: f"{mutant.family}: {mutant.name}",
)
def test_no_mutant_survives(mutant):
    assert_that_nothing_is_accused_before(mutant)
    found = climbed(mutant.family, mutant)
    assert found.verdict in {"FAIL", "REFUSED"}
    named = found.by.get(mutant.rung, "") if mutant.rung else found.accused
    assert re.search(mutant.accused, named), found.accused
