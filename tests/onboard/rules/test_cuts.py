"""Rows of several tensors that go on in the next, and parameters that end elsewhere."""

import pytest
import torch

from dayzero.onboard.rules.cuts import cut_as_stored, runs_of
from dayzero.onboard.rules.search import NoRule, find_rules, full_rules, layer_templates
from dayzero.runtime.safetensors_reader import TensorsReader
from dayzero.runtime.weights import Concat, Part, Squeeze, Stored, bind, check_coverage

SMALL, LARGE = (7, 9, 20), (6, 8, 22)  # rows of queries, keys and values
PARTS = ("query", "key", "value")


def model(rows, cuts, layers=2, seed=0):
    """(parameters, stored): convolutions of three parts, saved as tensors of `cuts` rows."""
    generator = torch.Generator().manual_seed(seed)
    parameters, stored = {}, {}
    for layer in range(layers):
        whole = torch.randn(sum(rows), 1, 4, generator=generator, dtype=torch.float64)
        for name, part in zip(PARTS, whole.squeeze(1).split(rows), strict=True):
            parameters[f"layers.{layer}.{name}_conv"] = part
        for name, part in zip("qkv", whole.split(cuts), strict=True):
            stored[f"model.{layer}.{name}_conv1d"] = part
    return parameters, stored


def rules_at(rows, layers=2):
    parameters, stored = model(SMALL, (12, 12, 12))
    shapes = {
        f"layers.{n}.{part}_conv": (size, 4) for n in range(layers) for part, size in zip(PARTS, rows, strict=True)
    }
    return full_rules(layer_templates(find_rules(parameters, stored)), [0] * layers, shapes), shapes


def assert_reads(rules, parameters, stored):
    on_disk = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    bound = bind([rule.build() for rule in rules])
    check_coverage(bound, on_disk)
    for name, value in parameters.items():
        assert torch.equal(bound[name].read(TensorsReader(stored), on_disk), value), name
    back = {name: torch.zeros_like(tensor) for name, tensor in stored.items()}
    for name, value in parameters.items():
        for tensor, region, part in bound[name].write(value, on_disk):
            back[tensor][region] = part
    assert all(torch.equal(back[name], tensor) for name, tensor in stored.items())


def test_a_run_is_found_in_the_order_of_its_rows():
    parameters, stored = model(SMALL, (12, 12, 12), layers=1)
    (run,) = runs_of(find_rules(parameters, stored))
    assert run.parameters == tuple(f"layers.0.{part}_conv" for part in PARTS)
    assert run.stored == tuple(Squeeze((1,), Stored(f"model.0.{name}_conv1d")) for name in "qkv")
    assert (run.dim, run.evenly(36), run.evenly(35)) == (0, [12] * 3, [12, 12, 11])


@pytest.mark.parametrize(
    "sources",
    [
        {"a": Part(0, 0, 3, Stored("x")), "b": Part(0, 3, 5, Stored("x"))},
        {"a": Concat(0, (Stored("x"), Stored("y")))},
        {"a": Concat(0, (Part(0, 0, 2, Stored("x"), 2), Part(0, 0, 2, Stored("y"), 2)))},
        {"a": Stored("x"), "b": Stored("y")},
        {"a": Concat(0, (Part(0, 0, 2, Stored("x")), Part(0, 0, 3, Stored("y")))),
         "b": Concat(0, (Part(0, 2, 4, Stored("x")), Part(0, 3, 5, Stored("y"))))},
    ],
)  # fmt: skip
def test_parts_that_do_not_go_on_are_no_run(sources):
    assert runs_of(sources) == []


def test_rows_are_cut_as_evenly_as_a_reference_saves_them():
    rules, _ = rules_at(LARGE)
    assert_reads(rules, *model(LARGE, (12, 12, 12)))


@pytest.mark.parametrize("cuts", [LARGE, (20, 6, 10), (1, 2, 33)])
def test_rows_are_cut_where_the_checkpoint_cuts_them(cuts):
    rules, shapes = rules_at(LARGE)
    parameters, stored = model(LARGE, cuts, seed=1)
    recut = cut_as_stored(rules, shapes, {name: tuple(tensor.shape) for name, tensor in stored.items()})
    assert_reads(recut, parameters, stored)
    if cuts == LARGE:
        assert {rule.parameter: rule.build().source for rule in recut} == {
            f"layers.{{layer}}.{part}_conv": Squeeze((1,), Stored(f"model.{{layer}}.{part[0]}_conv1d"))
            for part in PARTS
        }


def test_other_rows_in_all_are_left_to_be_settled():
    rules, shapes = rules_at(LARGE)
    stored = {f"model.{layer}.{name}_conv1d": (13, 1, 4) for layer in range(2) for name in "qkv"}
    assert cut_as_stored(rules, shapes, stored) == rules
    assert cut_as_stored(rules, shapes, {name: shape for name, shape in stored.items() if "q_" not in name}) == rules


def test_layers_of_one_rule_that_are_cut_differently_are_named():
    rules, shapes = rules_at(LARGE)
    stored = {
        f"model.{n}.{name}_conv1d": (rows, 1, 4) for n in range(2) for name, rows in zip("qkv", LARGE, strict=True)
    }
    stored |= {"model.1.q_conv1d": (8, 1, 4), "model.1.k_conv1d": (6, 1, 4)}
    with pytest.raises(NoRule, match=r"layers\.\{layer\}\.query_conv, .* cut at other places in other layers"):
        cut_as_stored(rules, shapes, stored)


def test_cuts_that_follow_from_nothing_are_refused():
    parameters, stored = model(SMALL, (12, 10, 14))
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    with pytest.raises(NoRule, match=r"cut at \[12, 10\]"):
        full_rules(layer_templates(find_rules(parameters, stored)), [0, 1], shapes)
