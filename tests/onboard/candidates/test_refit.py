"""Claims hold on models of other sizes: where a tensor is divided moves with them."""

from dayzero.onboard.candidates.evidence import Candidate
from dayzero.onboard.candidates.refit import refitted
from dayzero.runtime.weights import Concat, Part, Squeeze, Stored, Transpose

JOINT = Stored("joint.weight")


def claim(**parameters):
    return Candidate("Block", {}, parameters)


def test_parts_laid_end_to_end_follow_the_blocks_sizes():
    found = claim(
        query=Part(0, 0, 6, JOINT),
        key=Part(0, 6, 12, JOINT),
        value=Transpose(Part(0, 12, 17, JOINT)),
        out=Stored("out"),
    )
    wanted = {"query": (8, 4), "key": (8, 4), "value": (4, 9), "out": (4, 9)}
    made = refitted(found, wanted, {"joint.weight": (25, 4), "out": (4, 9)})
    assert made.parameters == {
        "query": Part(0, 0, 8, JOINT), "key": Part(0, 8, 16, JOINT), "value": Transpose(Part(0, 16, 25, JOINT)),
        "out": Stored("out"),
    }  # fmt: skip
    assert found.parameters["key"] == Part(0, 6, 12, JOINT)


def test_parts_of_groups_and_of_tensors_with_more_dimensions():
    stored = Stored("conv.weight")
    found = claim(a=Squeeze((1,), Part(0, 0, 3, stored, 2)), b=Squeeze((1,), Part(0, 3, 5, stored, 2)))
    made = refitted(found, {"a": (8, 4), "b": (6, 4)}, {"conv.weight": (14, 1, 4)})
    assert made.parameters == {
        "a": Squeeze((1,), Part(0, 0, 4, stored, 2)), "b": Squeeze((1,), Part(0, 4, 7, stored, 2))
    }  # fmt: skip


def test_parameters_of_blocks_inside_are_refitted_too():
    outer = Candidate("Outer", {"inner": claim(a=Part(0, 0, 2, JOINT), b=Part(0, 2, 5, JOINT))}, {})
    made = refitted(outer, {"inner.a": (3, 4), "inner.b": (3, 4)}, {"joint.weight": (6, 4)})
    assert made.parameters == {"inner.a": Part(0, 0, 3, JOINT), "inner.b": Part(0, 3, 6, JOINT)}


def test_what_fits_or_is_divided_otherwise_stays_as_it_is():
    fits = claim(a=Part(0, 0, 2, JOINT), b=Part(0, 2, 5, JOINT))
    assert refitted(fits, {"a": (2, 4), "b": (3, 4)}, {"joint.weight": (5, 4)}) is fits
    apart = claim(a=Part(0, 0, 2, JOINT), b=Part(0, 3, 5, JOINT))  # rows between them
    assert refitted(apart, {"a": (3, 4), "b": (3, 4)}, {"joint.weight": (7, 4)}) is apart
    twice = claim(a=Concat(0, (Part(0, 0, 2, JOINT), Part(0, 2, 5, JOINT))))
    assert refitted(twice, {"a": (6, 4)}, {"joint.weight": (6, 4)}).parameters == twice.parameters
    odd = claim(a=Part(0, 0, 2, JOINT))
    assert refitted(odd, {"a": (3, 5)}, {"joint.weight": (7, 4)}) is odd  # no whole number of rows
