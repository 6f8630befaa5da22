"""Rules found by value, on random models, and their inverse."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dayzero.onboard.rules.search import NoRule, find_rules, full_rules, layer_templates
from dayzero.runtime.safetensors_reader import TensorsReader
from dayzero.runtime.weights import Concat, Stack, Stored, Transpose, bind, whole

LAYOUTS = ("stored", "transpose", "concat", "concat transposed", "stack", "stack of concat", "stack transposed")


@st.composite
def models(draw):
    """(parameters, stored, layouts): every layer's parameters, and how they lie on disk under other names."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    layers, experts = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    layouts = draw(st.lists(st.sampled_from(LAYOUTS), min_size=1, max_size=3))
    sizes = draw(st.permutations([2, 3, 5, 7]))
    parameters, stored = {}, {}

    def new(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    for layer in range(layers):
        for number, layout in enumerate(layouts):
            ours, theirs = f"layers.{layer}.part{number}.weight", f"trunk.h.{layer}.x{number}_"
            one, two = new(sizes[0], sizes[1]), new(sizes[2], sizes[1])
            match layout:
                case "stored":
                    parameters[ours] = stored[theirs + "w"] = one
                case "transpose":
                    parameters[ours], stored[theirs + "w"] = one, one.mT.contiguous()
                case "concat":
                    parameters[ours] = torch.cat((one, two))
                    stored[theirs + "a"], stored[theirs + "b"] = one, two
                case "concat transposed":
                    parameters[ours] = torch.cat((one, two))
                    stored[theirs + "a"], stored[theirs + "b"] = one.mT.contiguous(), two
                case "stack" | "stack transposed":
                    parts = [new(sizes[0], sizes[1]) for _ in range(experts)]
                    parameters[ours] = torch.stack(parts)
                    flip = layout == "stack transposed"
                    for expert, part in enumerate(parts):
                        stored[f"{theirs}e.{expert}.w"] = part.mT.contiguous() if flip else part
                case "stack of concat":
                    pairs = [(new(sizes[0], sizes[1]), new(sizes[2], sizes[1])) for _ in range(experts)]
                    parameters[ours] = torch.stack([torch.cat(pair) for pair in pairs])
                    for expert, (first, second) in enumerate(pairs):
                        stored[f"{theirs}e.{expert}.a"], stored[f"{theirs}e.{expert}.b"] = first, second
    parameters["embed.weight"] = stored["trunk.wte"] = new(11, sizes[1])
    return parameters, stored, layers


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(models())
def test_rules_are_found_and_invert_exactly(model):
    parameters, stored, layers = model
    templates = layer_templates(find_rules(parameters, stored))
    shapes = {name: tuple(value.shape) for name, value in parameters.items()}
    rules = bind([spec.build() for spec in full_rules(templates, list(range(layers)), shapes)])
    assert rules.keys() == parameters.keys()
    on_disk = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    back = {}
    for name, rule in rules.items():
        assert rule.shape(on_disk) == shapes[name]
        value = rule.read(TensorsReader(stored), on_disk)
        assert torch.equal(value, parameters[name]), name
        for tensor, region, part in rule.write(value, on_disk):
            assert region == whole(on_disk[tensor])
            back[tensor] = part
    assert back.keys() == stored.keys()
    assert all(torch.equal(back[name], tensor) for name, tensor in stored.items())


def new(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_expressions_are_the_plainest():
    a, b = new(3, 4, seed=1), new(5, 4, seed=2)
    experts = [new(2, 4, seed=10 + number) for number in range(3)]
    stored = {"a": a, "b": b, "c": new(4, 6, seed=3), **{f"e.{n}.w": expert for n, expert in enumerate(experts)}}
    found = find_rules(
        {"whole": torch.cat((a, b)), "flipped": stored["c"].mT.contiguous(), "stack": torch.stack(experts)}, stored
    )
    assert found == {
        "whole": Concat(0, (Stored("a"), Stored("b"))),
        "flipped": Transpose(Stored("c")),
        "stack": Stack("expert", 3, Stored("e.{expert}.w")),
    }


def test_a_parameter_that_no_tensor_makes_is_named():
    with pytest.raises(NoRule, match=r"^layers\.0\.x: no stored tensor holds these \[3\] values"):
        find_rules({"layers.0.x": new(3)}, {"y": new(3, seed=1)})


def test_a_difference_in_the_last_bit_is_no_match():
    value = new(3, 4)
    near = value.clone()
    near[2, 3] += 2.0**-40
    with pytest.raises(NoRule, match=r"^w: "):
        find_rules({"w": value}, {"w": near})


def test_a_stored_tensor_that_nothing_uses_is_named():
    with pytest.raises(NoRule, match="no parameter is made of spare"):
        find_rules({"a": new(3)}, {"a": new(3), "spare": new(2, seed=1)})


def test_one_tensor_cannot_make_two_parameters():
    with pytest.raises(NoRule, match="a would be read for two parameters"):
        find_rules({"x": new(3), "y": new(3)}, {"a": new(3)})


def test_two_equal_tensors_are_ambiguous():
    """Which is which cannot be seen, so neither is silently taken for both."""
    with pytest.raises(NoRule):
        find_rules({"x": new(3), "y": new(3)}, {"a": new(3), "b": new(3)})


def test_experts_out_of_order_are_no_series():
    experts = [new(2, 4, seed=number) for number in range(3)]
    stored = {f"e.{number}.w": experts[place] for number, place in enumerate([1, 0, 2])}
    with pytest.raises(NoRule, match="does not continue the series"):
        find_rules({"stack": torch.stack(experts)}, stored)


def test_experts_that_do_not_count_from_zero_are_no_series():
    experts = [new(2, 4, seed=number) for number in range(3)]
    stored = {f"e.{number + 1}.w": expert for number, expert in enumerate(experts)}
    with pytest.raises(NoRule, match="does not continue the series"):
        find_rules({"stack": torch.stack(experts)}, stored)


def test_a_missing_expert_is_no_series():
    experts = [new(2, 4, seed=number) for number in range(4)]
    stored = {f"e.{number}.w": expert for number, expert in enumerate(experts) if number != 2}
    with pytest.raises(NoRule, match=r"^stack: "):
        find_rules({"stack": torch.stack(experts)}, stored)


def test_a_name_without_its_layers_number_is_no_rule():
    stored = {"h.0.w": new(3, seed=1), "h.5.w": new(3, seed=2)}
    found = find_rules({"layers.0.w": stored["h.0.w"], "layers.1.w": stored["h.5.w"]}, stored)
    with pytest.raises(NoRule, match=r"layers\.1\.w is made of h\.5\.w"):
        layer_templates(found)


def test_kinds_of_layers_become_ranges():
    """Shrunk: layer 0 dense, layer 1 routed with 2 experts; real: 8 layers, every second routed, 5 experts."""
    stored = {"h.0.d": new(3, 4, seed=1), "h.1.e.0.w": new(3, 4, seed=2), "h.1.e.1.w": new(3, 4, seed=3)}
    found = find_rules(
        {"layers.0.d": stored["h.0.d"], "layers.1.e": torch.stack([stored["h.1.e.0.w"], stored["h.1.e.1.w"]])}, stored
    )
    shapes = {f"layers.{n}.d": (3, 4) for n in range(0, 8, 2)} | {f"layers.{n}.e": (5, 3, 4) for n in range(1, 8, 2)}
    rules = full_rules(layer_templates(found), [0, 1] * 4, shapes)
    assert {rule.parameter: rule.ranges for rule in rules} == {
        "layers.{layer}.d": {"layer": (0, 7, 2)},
        "layers.{layer}.e": {"layer": (1, 8, 2)},
    }
    bound = bind([rule.build() for rule in rules])
    assert bound["layers.7.e"].names() == [f"h.7.e.{expert}.w" for expert in range(5)]
    assert bound["layers.6.d"].names() == ["h.6.d"]


@pytest.mark.parametrize("pattern", [[0, 1, 1, 0], [0, 0, 1], [0, 1, 0, 0, 1, 1, 1, 0]])
def test_irregular_kinds_keep_every_layer_exactly_once(pattern):
    stored = {"h.0.d": new(3, seed=1), "h.1.e": new(3, seed=2)}
    templates = layer_templates(find_rules({"layers.0.d": stored["h.0.d"], "layers.1.e": stored["h.1.e"]}, stored))
    shapes = {f"layers.{layer}.{'de'[kind]}": (3,) for layer, kind in enumerate(pattern)}
    bound = bind([rule.build() for rule in full_rules(templates, pattern, shapes)])
    assert {name: rule.names() for name, rule in bound.items()} == {
        f"layers.{layer}.{'de'[kind]}": [f"h.{layer}.{'de'[kind]}"] for layer, kind in enumerate(pattern)
    }


def _names_of(stored, parameters, follows):
    """Parameter -> names of its tensors, of a model whose layers follow the shrunk ones like this."""
    templates = layer_templates(find_rules(parameters, stored))
    shapes = {
        f"layers.{layer}.{name.split('.', 2)[2]}": tuple(parameters[name].shape)
        for layer, shrunk in enumerate(follows)
        for name in parameters
        if name.startswith(f"layers.{shrunk}.")
    }
    rules = full_rules(templates, follows, shapes)
    names = {name: rule.names() for name, rule in bind([rule.build() for rule in rules]).items()}
    return names, {(rule.parameter, rule.source.name): rule.ranges["layer"] for rule in rules}


def test_numbers_that_count_only_the_layers_that_have_such_a_tensor():
    """Shrunk: a layer without a query, then two kinds with one, numbered from 0. Real: two layers without, six with."""
    parameters = {f"layers.{layer}.query": new(3 + layer % 2, seed=layer) for layer in (1, 2)}
    parameters["layers.0.w"] = new(2, seed=5)
    stored = {f"queries.{layer - 1}": parameters[f"layers.{layer}.query"] for layer in (1, 2)}
    stored["layers.0.w"] = parameters["layers.0.w"]
    names, ranges = _names_of(stored, parameters, [0, 0, 1, 2, 1, 2, 1, 1])
    assert {name: found for name, found in names.items() if "query" in name} == {
        f"layers.{layer}.query": [f"queries.{layer - 2}"] for layer in range(2, 8)
    }
    assert set(ranges) == {("layers.{layer}.query", "queries.{layer-2}"), ("layers.{layer}.w", "layers.{layer}.w")}


def test_every_second_layer_is_numbered_through():
    parameters = {"layers.0.a": new(3, seed=1), "layers.1.b": new(4, seed=2)}
    stored = {"as.0": parameters["layers.0.a"], "bs.0": parameters["layers.1.b"]}
    names, ranges = _names_of(stored, parameters, [0, 1] * 3)
    assert [names[f"layers.{layer}.b"] for layer in (1, 3, 5)] == [["bs.0"], ["bs.1"], ["bs.2"]]
    assert ranges["layers.{layer}.b", "bs.{(layer-1)/2}"] == (1, 6, 2)
    # What looks like the layer's own number is taken for it.
    assert [names[f"layers.{layer}.a"] for layer in (0, 2, 4)] == [["as.0"], ["as.2"], ["as.4"]]


@pytest.mark.parametrize("follows", [[0, 1, 1, 0, 1], [1, 0, 0, 0, 1, 1, 0]])
def test_irregular_layers_are_numbered_through(follows):
    parameters = {"layers.0.a": new(3, seed=1), "layers.1.b": new(4, seed=2)}
    stored = {"as.1.x": parameters["layers.0.a"], "bs.0.x": parameters["layers.1.b"]}
    names, _ = _names_of(stored, parameters, follows)
    assert {name: found[0] for name, found in names.items()} == {
        f"layers.{layer}.{'ab'[kind]}": f"{'ab'[kind]}s.{follows[:layer].count(kind) + 1 - kind}.x"
        for layer, kind in enumerate(follows)
    }


def test_numbers_at_a_constant_distance():
    parameters = {f"layers.{layer}.w": new(3, seed=layer) for layer in (0, 1, 3)}
    stored = {f"h.{layer + 4}.w": value for layer, value in zip((0, 1, 3), parameters.values(), strict=True)}
    outside, inside = layer_templates(find_rules(parameters, stored))
    assert outside == {}
    assert {source["w"] for source in inside.values()} == {Stored("h.{layer+4}.w")}
