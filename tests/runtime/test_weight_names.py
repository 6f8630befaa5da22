"""Placeholders in tensor names, and numbers that follow from them."""

import pytest

from dayzero.runtime.weights import Decoded, Rule, Stored, bind
from dayzero.runtime.weights.names import filled, following


@pytest.mark.parametrize(
    ("offset", "step", "text", "numbers"),
    [
        (0, 1, "{layer}", {0: 0, 7: 7}),
        (1, 1, "{layer-1}", {1: 0, 12: 11}),
        (-3, 1, "{layer+3}", {0: 3}),
        (1, 2, "{(layer-1)/2}", {1: 0, 3: 1, 9: 4}),
        (0, 3, "{layer/3}", {0: 0, 9: 3}),
    ],
)
def test_a_number_that_follows_from_the_layers(offset, step, text, numbers):
    assert following("layer", offset, step) == text
    assert {layer: filled(f"h.{text}.e.{{expert}}", {"layer": layer, "expert": 5}) for layer in numbers} == {
        layer: f"h.{number}.e.5" for layer, number in numbers.items()
    }


def test_numbers_that_are_none():
    with pytest.raises(ValueError, match="layer 2 does not divide"):
        filled("h.{(layer-1)/2}", {"layer": 2})
    with pytest.raises(KeyError):
        filled("h.{layer-1}", {"expert": 2})


def test_rules_over_such_names():
    rules = [
        Rule("layers.{layer}.w", Stored("q.{layer-1}"), {"layer": range(1, 3)}),
        Rule("layers.{layer}.c", Decoded("fp8", (("codes", "c.{layer/2}"),)), {"layer": range(0, 3, 2)}),
    ]
    bound = bind(rules)
    assert [bound[f"layers.{n}.w"].names() for n in (1, 2)] == [["q.0"], ["q.1"]]
    assert [bound[f"layers.{n}.c"].names() for n in (0, 2)] == [["c.0"], ["c.1"]]
    assert bound["layers.2.w"].shape({"q.1": (3,)}) == (3,)
