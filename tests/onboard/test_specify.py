import json

import onboarded
import pytest

from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.oracle.reference import load_config
from dayzero.onboard.specify import specify, stored_as, unread_fields
from dayzero.onboard.specify_checkpoint import real_shapes, specify_checkpoint
from dayzero.runtime.package import load_package
from dayzero.runtime.spec import BlockSpec, ModelSpec


def spec_of(name):
    package = onboarded.get(name).package
    return ModelSpec.model_validate_json((package / "spec.json").read_text())


FFN = {
    "experts.hidden": 40, "experts.experts": 6, "experts.width": 32, "experts.act": "silu",
    "router.hidden": 40, "router.experts": 6, "router.top_k": 2, "router.score": "softmax",
}  # fmt: skip


def flat(block, prefix=""):
    """Its arguments; those of blocks inside under dotted names, where the block itself stands under its own."""
    found = {}
    for name, value in block.arguments.items():
        if isinstance(value, BlockSpec):
            found |= {prefix + name: value.block, **flat(value, f"{prefix}{name}.")}
        else:
            found[prefix + name] = value
    return found


# What an argument that is not named says.
DEFAULTS = {"qk_norm": "none", "window": None, "bias": False}


@pytest.mark.parametrize(
    ("name", "mixer", "ffn"),
    [
        ("llama", {"heads": 4, "kv_heads": 2, "head_dim": 12, "qk_norm": "none"}, {"width": 56, "act": "silu"}),
        ("qwen3", {"heads": 4, "kv_heads": 2, "head_dim": 12, "qk_norm": "head"}, {"width": 56, "act": "silu"}),
        ("mixtral", {"qk_norm": "none", "window": None}, {**FFN, "router.normalise": "Normalise"}),
        ("olmoe", {"heads": 4, "head_dim": 10, "qk_norm": "whole"}, {**FFN, "router.normalise": None}),
        pytest.param("mixtral, window", {"window": 5}, FFN, marks=pytest.mark.slow),
        pytest.param("olmoe, clip", {"clip": 0.5}, FFN, marks=pytest.mark.slow),
        pytest.param("llama, attention bias", {"bias": True, "output_bias": True}, {}, marks=pytest.mark.slow),
        pytest.param("llama, mlp bias", {"bias": False}, {"bias": True}, marks=pytest.mark.slow),
        pytest.param("llama, gelu", {}, {"act": "gelu"}, marks=pytest.mark.slow),
        pytest.param("qwen3_moe, attention bias", {"bias": True, "output_bias": True}, {}, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_the_blocks_of_the_real_model(name, mixer, ffn):
    kind = spec_of(name).layer_kinds[0]
    for block, wanted in (("mixer", mixer), ("ffn", ffn)):
        found = DEFAULTS | flat(kind.blocks[block])
        assert {name: found[name] for name in wanted} == wanted
    for block in kind.blocks.values():
        assert block.proof.status == "proven"
        assert block.proof.error <= 1e-9
        explained = {line.partition(" ")[0] for line in block.proof.evidence}
        assert flat(block).keys() - {"table"} <= explained  # which of the model's tables it reads follows from wiring


def test_kinds_of_layers_in_order():
    spec = spec_of("qwen3_moe")
    assert [kind.blocks["ffn"].block for kind in spec.kinds_in_order()] == [
        "MixtureOfExperts", "GatedFeedForward", "MixtureOfExperts",
    ]  # fmt: skip
    assert len(spec.layer_kinds) == 2


@pytest.mark.slow
def test_windows_belong_to_their_own_layers():
    windows = [
        kind.blocks["mixer"].arguments.get("window") for kind in spec_of("qwen3, two kinds of layer").kinds_in_order()
    ]
    assert windows == [None, 5, None]


@pytest.mark.slow
def test_sizes_of_the_real_model_not_of_the_small_one():
    """A config of another size with the same arithmetic: nothing of the shrunk model is left in the specification."""
    source = read_checkpoint(onboarded.checkpoint("mixtral"))
    config = {
        **source.config, "hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
        "intermediate_size": 14336, "num_local_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 40,
        "vocab_size": 150_000, "rms_norm_eps": 1e-6,
    }  # fmt: skip
    spec = specify(config, source.identity(), "x").spec
    shapes = real_shapes(spec)
    assert shapes["layers.39.ffn.experts.gate_up"] == (128, 2 * 14336, 4096)
    assert shapes["layers.0.mixer.key.weight"] == (8 * 128, 4096)
    assert shapes["head.weight"] == (150_000, 4096)
    (kind,) = spec.layer_kinds
    assert kind.blocks["ffn"].arguments["router"].arguments["top_k"] == 8
    assert kind.blocks["mixer"].arguments["scale"] == pytest.approx(128**-0.5, rel=1e-15)
    assert kind.blocks["mixer_norm"].arguments["eps"] == 1e-6
    experts = next(rule for rule in spec.rules if rule.parameter.endswith("experts.gate_up"))
    assert (experts.source.count, experts.ranges) == (128, {"layer": (0, 40)})


@pytest.mark.slow
def test_specifying_again_gives_the_same():
    source = read_checkpoint(onboarded.checkpoint("llama"))
    one, other = (specify_checkpoint(source, "x", {}, lambda line: None) for _ in range(2))
    assert one[0].spec == other[0].spec
    assert one[0].model_dump_json() == other[0].model_dump_json()
    assert one[1] == other[1]


def test_the_ledger_of_each_proof_is_in_its_evidence():
    """Every step and constant that the reference was seen to execute, and so ours: the report lists them."""
    spec = load_package(onboarded.get("mixtral").package).spec
    held = {block.block: block.proof.evidence[-1] for kind in spec.layer_kinds for block in kind.blocks.values()}
    begin = "on the small model both execute "
    assert held["RMSNorm"] == begin + "add, mean, mul, pow, rsqrt; constants 1e-05, 2"
    assert held["MixtureOfExperts"] == begin + "add, div, matmul, mul, silu, softmax, topk; no constants"
    text = (onboarded.get("mixtral").package / "REPORT.md").read_text()
    assert all(line in text for line in held.values())


def test_fields_that_nobody_read():
    config = json.loads((onboarded.checkpoint("mixtral") / "config.json").read_text())
    loaded = load_config(config)
    assert stored_as(loaded, "num_experts") == "num_local_experts"
    reads = set(config) - {"num_local_experts", "rms_norm_eps", "vocab_size"}
    assert unread_fields({**config, "novel": 1}, reads, loaded) == [
        "novel", "num_local_experts", "rms_norm_eps", "vocab_size",
    ]  # fmt: skip
