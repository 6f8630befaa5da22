"""Weight rules as bijections: random expressions over random shapes, read and written in whole and in part."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dayzero.runtime.safetensors_reader import TensorsReader
from dayzero.runtime.spec import SourceSpec
from dayzero.runtime.weights import BoundRule, Concat, Rule, Stack, Stored, Transpose, bind, whole

SIZE = st.integers(1, 4)
quick = settings(max_examples=150, deadline=None)


LAYER = 3


@st.composite
def expressions(draw, shape=None, depth=3, stacked=None, counter=None):
    """(source, stored tensors below it: name -> (shape, counts of the stacks around it)); the result has `shape`."""
    shape = shape or tuple(draw(st.lists(SIZE, min_size=1, max_size=3)))
    stacked, counter = stacked or {}, counter or itertools.count()
    below = {"depth": depth - 1, "stacked": stacked, "counter": counter}
    matrix = len(shape) >= 2
    kind = draw(st.sampled_from(["stored"] + depth * (["concat"] + matrix * ["transpose", "stack"])))
    if kind == "stored":
        name = ".".join([f"t{next(counter)}", "{layer}", *(f"{{{index}}}" for index in stacked)])
        return Stored(name), {name: (shape, stacked)}
    if kind == "transpose":
        part, stored = draw(expressions((*shape[:-2], shape[-1], shape[-2]), **below))
        return Transpose(part), stored
    if kind == "stack":
        over = f"e{next(counter)}"
        part, stored = draw(expressions(shape[1:], **{**below, "stacked": {**stacked, over: shape[0]}}))
        return Stack(over, shape[0], part), stored
    dim = draw(st.integers(0, len(shape) - 1))
    cuts = sorted(draw(st.sets(st.integers(1, shape[dim] - 1), max_size=2))) if shape[dim] > 1 else []
    parts, stored = [], {}
    for start, end in itertools.pairwise([0, *cuts, shape[dim]]):
        part, more = draw(expressions((*shape[:dim], end - start, *shape[dim + 1 :]), **below))
        parts.append(part)
        stored |= more
    return Concat(dim, tuple(parts)), stored


@st.composite
def cases(draw):
    """(rule, its checkpoint tensors with a different value in every element, their shapes)."""
    source, stored = draw(expressions())
    tensors, value = {}, 0
    for name, (shape, stacked) in stored.items():
        for places in itertools.product(*map(range, stacked.values())):
            index = dict(zip(stacked, places, strict=True))
            size = math.prod(shape)
            tensors[name.format(layer=LAYER, **index)] = torch.arange(value, value + size).reshape(shape)
            value += size
    return BoundRule("p", source, {"layer": LAYER}), tensors, {name: tuple(t.shape) for name, t in tensors.items()}


def regions(shape):
    bounds = [st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted) for size in shape]
    return st.tuples(*bounds).map(lambda pairs: tuple(slice(start, stop) for start, stop in pairs))


@quick
@given(cases())
def test_write_is_the_inverse_of_read(case):
    rule, tensors, shapes = case
    value = rule.read(TensorsReader(tensors), shapes)
    assert tuple(value.shape) == rule.shape(shapes)
    assert sorted(value.flatten().tolist()) == list(range(value.numel()))  # every element once
    assert sorted(rule.names()) == sorted(tensors)
    written = {}
    for name, region, part in rule.write(value, shapes):
        assert region == whole(shapes[name])
        assert name not in written
        written[name] = part
    assert written.keys() == tensors.keys()
    assert all(torch.equal(written[name], tensors[name]) for name in tensors)


@quick
@given(st.data())
def test_a_region_is_a_slice_of_the_whole(data):
    rule, tensors, shapes = data.draw(cases())
    region = data.draw(regions(rule.shape(shapes)))
    asked = []

    class Counting(TensorsReader):
        def read(self, name, region=None):
            part = super().read(name, region)
            asked.append(part.numel())
            return part

    part = rule.read(Counting(tensors), shapes, region)
    assert torch.equal(part, rule.read(TensorsReader(tensors), shapes)[region].to(part.dtype))
    assert sum(asked) == part.numel()  # no byte that is not needed


@quick
@given(st.data())
def test_writing_a_region_touches_exactly_it(data):
    rule, tensors, shapes = data.draw(cases())
    region = data.draw(regions(rule.shape(shapes)))
    value = rule.read(TensorsReader(tensors), shapes)[region]
    out = {name: torch.full_like(tensor, -1) for name, tensor in tensors.items()}
    for name, place, part in rule.write(value, shapes, region):
        assert torch.all(out[name][place] == -1)
        out[name][place] = part
    got = rule.read(TensorsReader(out), shapes)
    assert torch.equal(got[region].to(value.dtype), value)
    assert int((got != -1).sum()) == value.numel()


@quick
@given(cases())
def test_as_data_and_back(case):
    rule, _, _ = case
    spec = SourceSpec.of(rule.source)
    assert SourceSpec.model_validate_json(spec.model_dump_json()).build() == rule.source


def test_a_rule_stands_for_all_values_of_its_ranges():
    source = Stack("expert", 2, Stored("l{layer}.e{expert}"))
    bound = bind([Rule("layers.{layer}.w", source, {"layer": range(1, 6, 2)}), Rule("norm", Stored("n"))])
    assert list(bound) == ["layers.1.w", "layers.3.w", "layers.5.w", "norm"]
    assert bound["layers.3.w"].names() == ["l3.e0", "l3.e1"]


def test_two_rules_for_one_parameter_or_tensor():
    with pytest.raises(ValueError, match="two rules make a"):
        bind([Rule("a", Stored("x")), Rule("a", Stored("y"))])
    with pytest.raises(ValueError, match="two rules make a1"):
        bind([Rule("a{i}", Stored("x{i}"), {"i": range(3)}), Rule("a1", Stored("y"))])
    with pytest.raises(ValueError, match="x is read for both a and b"):
        bind([Rule("a", Stored("x")), Rule("b", Concat(0, (Stored("y"), Stored("x"))))])


def test_parts_that_do_not_fit():
    shapes = {"a": (2, 3), "b": (2, 4), "e0": (2,), "e1": (3,)}
    assert Concat(1, (Stored("a"), Stored("b"))).shape(shapes, {}) == (2, 7)
    with pytest.raises(ValueError, match="do not fit side by side"):
        Concat(0, (Stored("a"), Stored("b"))).shape(shapes, {})
    with pytest.raises(ValueError, match="different shapes"):
        Stack("i", 2, Stored("e{i}")).shape(shapes, {})
    with pytest.raises(KeyError, match="missing"):
        Stored("missing").shape(shapes, {})
