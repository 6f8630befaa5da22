"""Weight rules as bijections: random expressions over random shapes, read and written in whole and in part."""

import pytest
import torch
from expressions import cases, regions
from hypothesis import given, settings
from hypothesis import strategies as st

import dayzero.runtime.weights as weights
from dayzero.onboard.generate import source_text
from dayzero.runtime.safetensors_reader import TensorsReader
from dayzero.runtime.spec import SourceSpec
from dayzero.runtime.weights import (
    BoundRule,
    Cast,
    Concat,
    Decoded,
    Excerpt,
    Flatten,
    Part,
    Rule,
    Stack,
    Stored,
    Tie,
    Trim,
    bind,
    check_coverage,
)

quick = settings(max_examples=200, deadline=None)


class Counting(TensorsReader):
    """Counts the values that are asked for."""

    asked = 0

    def read(self, name, region=None):
        part = super().read(name, region)
        self.asked += part.numel()
        return part


@quick
@given(cases())
def test_write_is_the_inverse_of_read(case):
    values = {name: rule.read(TensorsReader(case.tensors), case.shapes) for name, rule in case.rules.items()}
    found = [int(number) for value in values.values() for number in value.flatten()]
    assert sorted(found) == sorted(case.live)  # every value that is no padding, once
    assert {name for rule in case.rules.values() for name in rule.names()} == case.tensors.keys()
    written = {name: torch.full_like(tensor, -1) for name, tensor in case.tensors.items()}
    for parameter, rule in case.rules.items():
        assert tuple(values[parameter].shape) == rule.shape(case.shapes)
        for name, region, part in rule.write(values[parameter], case.shapes):
            assert torch.all(written[name][region] == -1)  # nothing twice
            written[name][region] = part.to(written[name].dtype)
    for name, tensor in case.tensors.items():
        assert torch.equal(written[name], tensor)


@quick
@given(st.data())
def test_a_region_is_the_slice_of_the_whole_and_reads_only_itself(data):
    case = data.draw(cases())
    region = data.draw(regions(case.rule.shape(case.shapes), steps=True))
    reader = Counting(case.tensors)
    part = case.rule.read(reader, case.shapes, region)
    assert torch.equal(part, case.rule.read(TensorsReader(case.tensors), case.shapes)[region])
    pieces = list(case.rule.pieces(part, case.shapes, region))
    assert sum(piece.view.numel() for piece in pieces if piece.role == "value") == part.numel()
    assert reader.asked == sum(piece.view.numel() for piece in pieces)  # no value that is not needed


@quick
@given(st.data())
def test_writing_a_region_touches_exactly_it(data):
    case = data.draw(cases())
    region = data.draw(regions(case.rule.shape(case.shapes), steps=True))
    value = case.rule.read(TensorsReader(case.tensors), case.shapes)[region]
    out = {name: torch.full_like(tensor, -1) for name, tensor in case.tensors.items()}
    for name, place, part in case.rule.write(value, case.shapes, region):
        assert torch.all(out[name][place] == -1)
        out[name][place] = part.to(out[name].dtype)
    got = torch.full(case.rule.shape(case.shapes), -1, dtype=value.dtype)
    for piece in case.rule.pieces(got, case.shapes):
        if piece.role == "value":
            piece.view.copy_(out[next(piece.leaf.names(piece.index))][piece.region])
    assert torch.equal(got[region], value)
    assert int((got != -1).sum()) == value.numel()


@quick
@given(st.data())
def test_filling_shards_of_another_dtype(data):
    case = data.draw(cases())
    shape = case.rule.shape(case.shapes)
    cut = data.draw(st.integers(0, shape[0]))
    whole = torch.zeros(shape, dtype=torch.float64)
    for start, stop in ((0, cut), (cut, shape[0])):
        region = (slice(start, stop), *(slice(0, size) for size in shape[1:]))
        case.rule.fill(whole[start:stop], TensorsReader(case.tensors), case.shapes, region)
    assert torch.equal(whole, case.rule.read(TensorsReader(case.tensors), case.shapes).double())


@quick
@given(cases())
def test_as_data_and_as_python_and_back(case):
    spec = SourceSpec.of(case.rule.source)
    assert SourceSpec.model_validate_json(spec.model_dump_json()).build() == case.rule.source
    assert eval(source_text(spec), vars(weights).copy()) == case.rule.source


@quick
@given(st.data())
def test_coverage(data):
    case = data.draw(cases())
    check_coverage(case.rules, case.shapes)
    others = sorted(case.rules.keys() - {"p"})
    if not others:
        return
    lost = data.draw(st.sampled_from(others))
    with pytest.raises(ValueError, match=r"rows of t.* are read for nothing"):
        check_coverage({name: rule for name, rule in case.rules.items() if name != lost}, case.shapes)
    with pytest.raises(ValueError, match=rf"the same part of t.* is read for .*{lost}"):
        check_coverage({**case.rules, "again": case.rules[lost]}, case.shapes)


def test_quantised_as_data_and_as_python():
    source = Stack("expert", 2, Decoded("mxfp4_packed", (("packed", "e{expert}.w_packed"), ("scale", "e{expert}.s"))))
    spec = SourceSpec.of(source)
    assert SourceSpec.model_validate_json(spec.model_dump_json()).build() == source
    assert eval(source_text(spec), vars(weights).copy()) == source


def test_a_field_of_another_node():
    with pytest.raises(ValueError, match="stored"):
        SourceSpec(op="stored", name="a", dim=1).build()
    with pytest.raises(ValueError, match="transpose over 2 expressions"):
        SourceSpec(op="transpose", parts=[SourceSpec(op="stored", name="a")] * 2).build()
    with pytest.raises(ValueError, match="part"):
        SourceSpec(op="transpose").build()


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
    with pytest.raises(ValueError, match="x is read for both a and b"):
        bind([Rule("a", Part(0, 0, 2, Stored("x"))), Rule("b", Stored("x"))])
    with pytest.raises(ValueError, match="x is read for both a and a"):
        bind([Rule("a", Concat(0, (Stored("x"), Stored("x"))))])
    assert len(bind([Rule("a", Part(0, 0, 2, Stored("x"))), Rule("b", Part(0, 2, 4, Stored("x")))])) == 2


def test_parts_that_overlap_or_leave_something_out():
    shapes = {"x": (6, 2)}
    rules = [Rule("a", Part(0, 0, 2, Stored("x"))), Rule("b", Part(0, 2, 4, Stored("x")))]
    with pytest.raises(ValueError, match=r"2 of 6 rows of x \[6, 2\] are read for nothing, from 4 of dimension 0 on"):
        check_coverage(bind(rules), shapes)
    check_coverage(bind([*rules, Rule("c", Part(0, 4, 6, Stored("x")))]), shapes)
    with pytest.raises(ValueError, match="the same part of x is read for c and b"):
        check_coverage(bind([*rules, Rule("c", Part(0, 3, 6, Stored("x")))]), shapes)


def test_an_excerpt_leaves_the_rest_as_it_is():
    stored = {"x": torch.arange(10.0).view(2, 5)}
    shapes = {"x": (2, 5)}
    source = Excerpt(0, 5, 10, Flatten(0, Stored("x")))
    bound = bind([Rule("a", source)])
    check_coverage(bound, shapes)
    assert bound["a"].read(TensorsReader(stored), shapes).tolist() == [5, 6, 7, 8, 9]
    for name, region, part in bound["a"].write(-torch.ones(5), shapes):
        stored[name][region] = part
    assert stored["x"].tolist() == [[0, 1, 2, 3, 4], [-1] * 5]
    assert SourceSpec.of(source).build() == source
    with pytest.raises(ValueError, match="the same part of x is read for b and a"):
        check_coverage(bind([Rule("a", source), Rule("b", Part(0, 1, 2, Stored("x")))]), shapes)
    with pytest.raises(ValueError, match="x is read for both a and b"):
        bind([Rule("a", source), Rule("b", Stored("x"))])


def test_parts_that_do_not_fit():
    shapes = {"a": (2, 3), "b": (2, 4), "e0": (2,), "e1": (3,)}
    assert Concat(1, (Stored("a"), Stored("b"))).shape(shapes, {}) == (2, 7)
    with pytest.raises(ValueError, match="do not fit side by side"):
        Concat(0, (Stored("a"), Stored("b"))).shape(shapes, {})
    with pytest.raises(ValueError, match="different shapes"):
        Stack("i", 2, Stored("e{i}")).shape(shapes, {})
    with pytest.raises(KeyError, match="missing"):
        Stored("missing").shape(shapes, {})
    with pytest.raises(ValueError, match="a and b are tied but have different shapes"):
        Tie((Stored("a"), Stored("b"))).shape(shapes, {})
    with pytest.raises(ValueError, match=r"a \[2, 3\] has no rows 1:3 in 1 groups"):
        Part(0, 1, 3, Stored("a")).shape(shapes, {})
    with pytest.raises(ValueError, match=r"b \[2, 4\] has no rows 0:1 in 3 groups"):
        Part(1, 0, 1, Stored("b"), groups=3).shape(shapes, {})
    with pytest.raises(ValueError, match=r"e0 \[2\] has fewer than 3 rows"):
        Trim(0, 3, Stored("e0")).shape(shapes, {})
    with pytest.raises(ValueError, match="3 rows are not blocks of 3 in which 2 alternate"):
        weights.Deinterleave(0, 2, Stored("e1")).shape(shapes, {})
    with pytest.raises(ValueError, match=r"a \[2, 3\] has more than one element"):
        weights.Squeeze((0,), Stored("a")).shape(shapes, {})
    with pytest.raises(ValueError, match=r"e1 \[3\] does not fall into 2"):
        weights.Unflatten(0, 2, Stored("e1")).shape(shapes, {})


def test_padding_that_is_not_zero_and_copies_that_differ():
    tensors = {"a": torch.tensor([1.0, 2.0, 0.0, 3.0]), "b": torch.tensor([1.0, 2.0, 0.0, 3.5])}
    shapes = {"a": (4,), "b": (4,)}
    with pytest.raises(ValueError, match="a has 1 values that are not 0 where padding belongs"):
        BoundRule("p", Trim(0, 2, Stored("a")), {}).read(TensorsReader(tensors), shapes)
    with pytest.raises(ValueError, match="b differs from the tensor that it should repeat"):
        BoundRule("p", Tie((Stored("a"), Stored("b"))), {}).read(TensorsReader(tensors), shapes)
    same = tensors | {"b": tensors["a"].clone()}
    rule = BoundRule("p", Tie((Stored("a"), Stored("b"))), {})
    assert torch.equal(rule.read(TensorsReader(same), shapes), tensors["a"])
    assert [name for name, _, _ in rule.write(tensors["a"], shapes)] == ["a", "b"]


def test_dtypes():
    tensors = {"a": torch.ones(2, dtype=torch.bfloat16), "b": torch.full((2,), 1 + 2**-12)}
    shapes = {"a": (2,), "b": (2,)}
    both = BoundRule("p", Concat(0, (Stored("a"), Stored("b"))), {}).read(TensorsReader(tensors), shapes)
    assert both.dtype == torch.float32
    assert both[2] == 1 + 2**-12  # one float32 tensor among others loses nothing
    assert BoundRule("p", Stored("a"), {}).read(TensorsReader(tensors), shapes).dtype == torch.bfloat16
    rounded = BoundRule("p", Cast("bfloat16", Stored("b")), {})
    assert torch.equal(rounded.read(TensorsReader(tensors), shapes), torch.ones(2, dtype=torch.bfloat16))
    wide = torch.zeros(2)
    rounded.fill(wide, TensorsReader(tensors), shapes)
    assert torch.equal(wide, torch.ones(2))
