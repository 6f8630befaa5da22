"""A third of the conformance field, onboarded: what docs/zoo.md says passes still does."""

import re
from pathlib import Path

import pytest
from zoo import families
from zoo.conformance import Result, run_all, table

TABLE = Path(__file__).parents[2] / "docs" / "zoo.md"
# Every third family by name: all kinds of mixers, routers and layouts are among them.
THIRD = sorted(families.FAMILIES)[::3]


def recorded():
    """Families that passed when the table was written."""
    rows = re.findall(r"^\| (\S+) \| (\S+) \| (\S+) \| (\S+) \|", TABLE.read_text() if TABLE.exists() else "", re.M)
    return {name for name, *rungs in rows if set(rungs) <= {"PASS", "WARN"}}


@pytest.fixture(scope="module")
def results():
    return {result.family: result for result in run_all(THIRD)}


@pytest.mark.slow
@pytest.mark.parametrize("family", THIRD)
def test_a_family_does_what_the_table_says(results, family):
    result = results[family]
    if family in recorded():
        assert result.passed, result.why
    else:
        assert result.passed or result.why


def test_the_table_counts_what_passed_and_says_why_not():
    why = "like GroupedQueryAttention, but for values (of v_proj, v_conv)"
    lifted = [("layers.{layer}.attn", "mixer of layer 0", why), ("layers.{layer}.attn", "mixer of layer 2", why)]
    results = [
        Result("b", {"L0": "PASS", "L1": "WARN", "L2": "PASS"}, 1.0, [], ["L1: a field"], 4.0),
        Result("a", {}, 0.4, [], ["layers.0.mixer: no block | reproduces it"], 2.0),
        Result("c", {"L0": "PASS", "L1": "PASS", "L2": "PASS"}, 0.8, lifted, [], 9.0),
    ]
    text = table(results, 60.0)
    assert "**2 of 3 families pass L0, L1 and L2; 1 of them with nothing lifted.**" in text
    assert "| a | - | - | - | 40.0% |  | layers.0.mixer: no block / reproduces it | 2 |" in text
    assert "| c | PASS | PASS | PASS | 80.0% | layers.{layer}.attn |  | 9 |" in text
    places = "`layers.{layer}.attn` (mixer of layer 0), `layers.{layer}.attn` (mixer of layer 2)"
    assert "## What is lifted, and why\n\n" in text
    assert f"\n- **c** {places}: {why}\n" in text
    assert text.index("| a |") < text.index("| b |")
    assert recorded() <= set(families.FAMILIES)
