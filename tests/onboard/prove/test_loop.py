"""A layer whose first pass and later ones are proven apart is one layer."""

import pytest

from dayzero.onboard.candidates import Candidate
from dayzero.onboard.candidates.evidence import literal
from dayzero.onboard.prove.block import Attempt
from dayzero.onboard.prove.loop import both_passes
from dayzero.onboard.prove.proven import NotProven, ProvenLayer, ProvenPart
from dayzero.onboard.structure.units import Unit


def part(name, path, block="RMSNorm"):
    unit = Unit(name, path, "norm", {"x": 1.0})
    return ProvenPart(unit, Attempt(Candidate(block, {}, {}), 0.0, ""), {"x": literal(1.0, "")}, [])


def test_one_layer_of_two_passes():
    first = ProvenLayer([part("norm", "a"), part("ffn", "b")], {})
    later = ProvenLayer([part("norm", "gate", "MessageGate"), part("norm_2", "a"), part("ffn", "b")], {})
    again = both_passes("layers.1", first, later).again
    assert again is not None
    assert [(step.name, step.part) for step in again.steps] == [
        ("norm", "norm_2"),
        ("norm_2", "norm"),
        ("ffn", "ffn"),
    ]
    assert [held.unit.name for held in again.parts] == ["norm_2"]
    with pytest.raises(NotProven, match=r"layers\.1\.a: it is one block in the first pass and another in later ones"):
        both_passes("layers.1", first, ProvenLayer([part("norm", "a", "LayerNorm")], {}))
