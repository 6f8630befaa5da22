"""Stored tensors of which no parameter is made: what a reference never reads, and tables that it computes itself."""

import json
import shutil
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from zoo import families
from zoo.conformance import write_checkpoint

from dayzero.onboard.align.tables import table_errors
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.inspect.classify import classify, settle
from dayzero.onboard.oracle.reference import build, on_disk, redraw, run
from dayzero.onboard.rules.search import LeftOver
from dayzero.onboard.rules.unmapped import COMPUTED, NEVER_READ, fates, unmapped, unmapped_rules
from dayzero.runtime.nn import Router
from dayzero.runtime.safetensors_reader import SafetensorsReader
from dayzero.runtime.spec import RuleSpec, SourceSpec
from dayzero.runtime.weights import Concat, Stack, Stored, bind

ROUTED, IDENTITY = 8, 3  # experts with weights, and experts that give back what they get
TOP_K = 2
NAMES = ("gate", "up", "down")
EXPERTS = "model.layers.0.mlp.experts"
TABLES = ("query_decay", "key_decay", "diagonal_decay")


def reference_of(config):
    model, _ = build(config)
    redraw(model, torch.Generator().manual_seed(0))
    return model


@pytest.fixture(scope="module")
def with_identity():
    """(config, reference): the rows of `gate_up_proj` for identity experts are there and never read."""
    config = {**families.config("longcat_flash"), "n_routed_experts": ROUTED, "zero_expert_num": IDENTITY}
    config["moe_topk"] = TOP_K
    return config, reference_of(config)


def router(classes, top_k):
    """A model of ours, as far as it is looked at: its router."""
    return nn.Sequential(Router(4, classes, top_k))


def never_read(layers=2):
    return [
        f"model.layers.{layer}.mlp.experts.{expert}.{part}_proj.weight"
        for layer in range(layers)
        for expert in range(ROUTED, ROUTED + IDENTITY)
        for part in ("gate", "up")
    ]


def ids_of(tokens, vocabulary=100):
    return torch.randint(3, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(1))


def test_rows_of_experts_that_compute_nothing_are_never_read(with_identity):
    _, reference = with_identity
    before = {name: tensor.clone() for name, tensor in reference.state_dict().items()}
    found = unmapped(never_read(), reference, router(ROUTED + IDENTITY, TOP_K), ids_of(24))
    assert found.unread == [f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)]
    assert (found.computed, found.files) == ([], set(never_read()))
    assert all(torch.equal(before[name], tensor) for name, tensor in reference.state_dict().items())


def test_an_expert_that_nobody_chose_is_still_read(with_identity):
    config, reference = with_identity
    ids = ids_of(24)
    for expert in range(ROUTED):
        name = f"{EXPERTS}.{expert}.gate_proj.weight"
        broken = {n: t.clone() for n, t in reference.state_dict().items()}
        broken["model.layers.0.mlp.experts.gate_up_proj"][expert] = float("nan")
        other = reference_of(config)
        other.load_state_dict(broken)
        with torch.no_grad():
            chosen = bool(run(other, ids).isnan().any())
        with pytest.raises(LeftOver, match=r"no parameter is made of .*experts"):
            unmapped([name, *never_read()], reference, router(ROUTED + IDENTITY, TOP_K), ids)
        if not chosen:
            return  # the case that this test is about has been seen
    pytest.fail("every expert was chosen: take fewer tokens")


def test_too_few_tokens_for_every_expert_prove_nothing(with_identity):
    _, reference = with_identity
    with pytest.raises(LeftOver):
        unmapped(never_read(), reference, router(ROUTED + IDENTITY, TOP_K), ids_of(3))


@pytest.fixture(scope="module")
def identity_rules(with_identity):
    """Rules for the real model: more experts, three times the layers."""
    config, reference = with_identity
    full, _ = build({**config, "n_routed_experts": 12, "zero_expert_num": 5, "num_layers": 6}, device="meta")
    names = [f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(2)]
    return unmapped_rules(names, reference, full, "model.layers", [0, 1, 0, 1, 0, 1], {})[0]


def test_their_names_in_the_real_model(identity_rules):
    bound = bind([rule.build() for rule in identity_rules])
    assert list(bound) == [f"model.layers.{layer}.mlp.experts.gate_up_proj" for layer in range(6)]
    names = bound["model.layers.5.mlp.experts.gate_up_proj"].names()
    assert names == [f"model.layers.5.mlp.experts.{e}.{part}_proj.weight" for e in range(17) for part in ("gate", "up")]
    assert fates(identity_rules, [])[names[-1]] == ("carried", NEVER_READ)


def test_a_group_of_which_some_are_carried_comes_in_two(with_identity, tmp_path):
    """Experts 0 to 7 are mapped, 8 to 10 carried; a twelfth, which the config does not have, stays open."""
    _, reference = with_identity
    stored = {name: tensor.float() for name, tensor in on_disk(reference).items() if "experts" in name}
    stored[f"{EXPERTS}.11.gate_proj.weight"] = torch.zeros_like(stored[f"{EXPERTS}.0.gate_proj.weight"])
    save_file(stored, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(families.config("longcat_flash")))
    checkpoint = read_checkpoint(tmp_path)
    gate, up, down = (Stored(f"model.layers.{{layer}}.mlp.experts.{{expert}}.{n}_proj.weight") for n in NAMES)
    sources = {"gate_up": Stack("expert", ROUTED, Concat(0, (gate, up))), "down": Stack("expert", ROUTED, down)}
    rules = [
        RuleSpec(parameter=f"layers.{{layer}}.{name}", source=SourceSpec.of(source), ranges={"layer": (0, 2)})
        for name, source in sources.items()
    ]
    width, hidden = stored[f"{EXPERTS}.0.gate_proj.weight"].shape
    shapes = {f"layers.{layer}.gate_up": (ROUTED, 2 * width, hidden) for layer in range(2)}
    shapes |= {f"layers.{layer}.down": (ROUTED, hidden, width) for layer in range(2)}
    others = dict.fromkeys([name for name in stored if ".11." not in name], ("carried", NEVER_READ))
    spec: Any = SimpleNamespace(rules=rules)
    ledger = settle(classify(checkpoint), checkpoint, spec, shapes, others=others)
    groups = {n: [group for group in ledger.groups if f".{n}_proj" in group.pattern] for n in NAMES}
    assert [(group.fate, group.experts, group.count, group.missing) for group in groups["up"]] == [
        ("mapped", "0-7", 16, 0),
        ("carried", "8-10", 6, 0),
    ]
    assert [(group.fate, group.experts, group.parameter) for group in groups["down"]] == [
        ("mapped", "0-7", "layers.{layer}.down")
    ]
    assert [group.fate for group in groups["gate"]] == ["open", "carried"]
    assert ledger.unaccounted == [f"{EXPERTS}.11.gate_proj.weight"]


@pytest.fixture(scope="module")
def decays(tmp_path_factory):
    """(checkpoint folder, rules for its tables, parameters' rules): decays that a constructor computes of slopes."""
    config = families.config("minimax")
    folder = write_checkpoint("minimax", tmp_path_factory.mktemp("decays") / "minimax")
    reference = reference_of(config)
    names = [f"model.layers.{layer}.self_attn.{table}" for layer in (1, 3) for table in TABLES]
    found = unmapped(names, reference, router(8, 2), ids_of(8))
    assert (found.unread, found.files) == ([], set(names))
    assert found.computed == [
        f"model.layers.{layer}.self_attn.{table}" for layer in (1, 3) for table in ("slope_rate", *TABLES)
    ]
    full, _ = build(config, device="meta")
    rules, _ = unmapped_rules(found.computed, reference, full, "model.layers", [0, 1, 2, 3], {})
    slopes = [rule for rule in rules if "slope_rate" in rule.parameter]
    return folder, rules, bind([rule.build() for rule in slopes])


def errors_of(decays, tmp_path, change=lambda tensors: None):
    """What is wrong with the tables of the checkpoint after change(tensors)."""
    folder, rules, mapped = decays
    folder = shutil.copytree(folder, tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    checkpoint = read_checkpoint(folder)
    reader = SafetensorsReader(folder, {name: header.file for name, header in checkpoint.headers.items()})
    shapes = {name: header.shape for name, header in checkpoint.headers.items()}
    return table_errors(checkpoint.config, rules, mapped, reader, shapes)


def test_stored_tables_are_what_the_constructor_computes(decays, tmp_path):
    assert errors_of(decays, tmp_path) == {"8 stored tables are what the reference computes": 0.0}
    assert fates([], decays[1])["model.layers.3.self_attn.key_decay"] == ("derived", COMPUTED)


def test_tables_that_were_rounded_or_left_out_are_no_contradiction(decays, tmp_path):
    def change(tensors):
        for name in [name for name in tensors if name.endswith("_decay") or name.endswith("slope_rate")]:
            tensors[name] = tensors[name].bfloat16()
        del tensors["model.layers.1.self_attn.key_decay"]

    assert errors_of(decays, tmp_path, change) == {"7 stored tables are what the reference computes": 0.0}


@pytest.mark.parametrize("factor", [1 + 1e-5, 0.0, float("nan")])
def test_a_table_that_is_another_is_named(decays, tmp_path, factor):
    name = "model.layers.3.self_attn.query_decay"

    def change(tensors):
        tensors[name][2, 1] *= factor

    (said, error), fine = errors_of(decays, tmp_path, change).items()
    assert said.startswith(f"{name} holds ")
    assert "where the reference computes 0." in said
    assert error == float("inf")
    assert fine == ("7 stored tables are what the reference computes", 0.0)


def test_the_smallest_slope_counts_as_much_as_the_largest(decays, tmp_path):
    """Ours is computed with the stored slopes: a change beside which the largest decay is large shows all the same."""

    def change(tensors):
        slopes = tensors["model.layers.1.self_attn.slope_rate"]
        slopes[slopes.argmin()] += 3e-8

    (said, error), _ = errors_of(decays, tmp_path, change).items()
    assert said.startswith("model.layers.1.self_attn.slope_rate holds ")
    assert error == float("inf")
