import json

import onboarded
import pytest

from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.prove.interventions import alternatives, varied_fields
from dayzero.onboard.specify_checkpoint import specify_checkpoint


@pytest.fixture(scope="module")
def specified():
    """Specifications of variants, each made once."""
    made = {}

    def of(name):
        if name not in made:
            source = read_checkpoint(onboarded.checkpoint(name))
            made[name] = specify_checkpoint(source, "x", {}, lambda line: None)[0]
        return made[name]

    return of


def effects(specification):
    return {(item.field, json.dumps(item.altered)): item.effect for item in specification.interventions}


@pytest.mark.slow
def test_every_field_that_matters_is_followed_or_proven_anew(specified):
    found = effects(specified("qwen3_moe"))
    assert found["norm_topk_prob", "false"] == "follows"
    assert found["hidden_act", '"gelu"'] == "other block"
    assert found["num_experts_per_tok", "6"] == "follows"
    assert [(name, e) for name, e in found.items() if name[0].endswith("_experts")] == [
        (("num_local_experts", "13"), "follows")
    ]
    assert found["attention_bias", "true"] == "other block"
    assert [effect for (field, _), effect in found.items() if field == "rms_norm_eps"] == ["follows"]
    assert [effect for (field, _), effect in found.items() if field == "rope_parameters.rope_theta"] == ["follows"]
    assert "unexplained" not in found.values()


@pytest.mark.slow
def test_a_value_of_none_hides_nothing(specified):
    found = {item.field: item for item in specified("olmoe").interventions if item.value is None}
    assert found["clip_qkv"].effect == "other block"
    assert "clip" in found["clip_qkv"].detail
    window = {item.field: item for item in specified("mixtral").interventions}["sliding_window"]
    assert (window.value, window.altered, window.effect) == (None, 5, "other block")
    assert "window" in window.detail
    act = {item.field: item for item in specified("mixtral").interventions}["hidden_act"]  # inside the experts
    assert act.detail == "ffn.experts.act: 'silu' (the trace's activation) -> 'gelu' (the trace's activation)"


@pytest.mark.slow
def test_dropout_and_jitter_change_nothing_in_evaluation(specified):
    found = {item.field: item.effect for item in specified("mixtral").interventions}
    assert found["attention_dropout"] == found["router_jitter_noise"] == "none"


def test_alternatives():
    assert alternatives("a", True) == [False]
    assert alternatives("a", 3) == [4, 6]
    assert alternatives("a", 1) == [2]
    assert alternatives("a", 2.0) == [3.4]
    assert alternatives("a", 0.0) == [0.3]
    assert alternatives("a", None) == [0.5, 5]
    assert alternatives("norm_eps", None) == [3e-5]
    assert alternatives("hidden_act", "silu") == ["gelu"]
    assert alternatives("hidden_act", "gelu_new") == ["silu"]
    assert alternatives("a", "eager") == []


def test_only_what_the_reference_reads_is_varied():
    config = {"a": 1.0, "b": 2.0, "hidden_size": 48, "num_experts": 8, "rope_parameters": {"x": 2.0, "kind": "y"}}
    varied = list(varied_fields(config, {"a", "hidden_size", "num_experts", "rope_parameters"}))
    assert list(dict.fromkeys(name for name, *_ in varied)) == ["a", "num_experts", "rope_parameters.x"]
    assert varied[0] == ("a", 1.0, 1.7, {**config, "a": 1.7})
    assert varied[-1] == ("rope_parameters.x", 2.0, 3.4, {**config, "rope_parameters": {"x": 3.4, "kind": "y"}})


def test_settings_of_settings_are_varied_whatever_their_type():
    config = {"attn": {"full": {"theta": 2.0, "ends": True}, "kv_heads": 2, "num_key_value_heads": 2, "clip": None}}
    varied = {(name, other): fields for name, _, other, fields in varied_fields(config, {"attn"})}
    assert sorted(varied) == [
        ("attn.full.ends", False), ("attn.full.theta", 3.4), ("attn.kv_heads", 3), ("attn.kv_heads", 4),
    ]  # fmt: skip
    assert varied["attn.full.ends", False] == {"attn": {**config["attn"], "full": {"theta": 2.0, "ends": False}}}
    assert config["attn"]["full"] == {"theta": 2.0, "ends": True}
