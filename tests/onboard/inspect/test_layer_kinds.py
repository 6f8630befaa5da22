"""Kinds of layers and formats that no manifest of tests/data has, from names and shapes alone."""

import pytest
import skeleton

from dayzero.onboard.checkpoint import Checkpoint
from dayzero.onboard.inspect.classify import classify
from dayzero.runtime.headers import TensorHeader

NORMS = {"input_layernorm.weight": [8], "post_attention_layernorm.weight": [8]}
ATTENTION = {f"self_attn.{part}_proj.weight": [8, 8] for part in "qkvo"}
DENSE = {f"mlp.{part}_proj.weight": [8, 8] for part in ("gate", "up", "down")}
MAMBA = {"A_log": [4], "D": [4], "dt_bias": [4], "conv1d.weight": [8, 1, 4], "in_proj.weight": [8, 8]}
LFM = {"conv.conv.weight": [8, 1, 3], "conv.in_proj.weight": [24, 8], "conv.out_proj.weight": [8, 8]}
LIGHTNING = {"query_key_value.weight": [24, 8], "g_proj.weight": [8, 8], "g_norm.weight": [8], "dense.weight": [8, 8]}
KINDS = {
    "full, dense, plain": NORMS | ATTENTION | DENSE,
    "full, dense, sandwich": NORMS
    | ATTENTION
    | DENSE
    | {"pre_feedforward_layernorm.weight": [8], "post_feedforward_layernorm.weight": [8]},
    "full, dense, parallel": {"input_layernorm.weight": [8]} | ATTENTION | DENSE,
    "full, none, plain": {"norm.weight": [8], **{f"mixer.{part}_proj.weight": [8, 8] for part in "qkvo"}},
    "state-space, none, plain": {"norm.weight": [8], **{f"mixer.{name}": shape for name, shape in MAMBA.items()}},
    "none, routed, plain": {"norm.weight": [8], "mixer.experts.0.up_proj.weight": [8, 8], "mixer.gate.weight": [1, 8]},
    "conv, dense, plain": {"operator_norm.weight": [8], "ffn_norm.weight": [8], **LFM, **DENSE},
    "linear, dense, plain": NORMS | {f"attention.{name}": shape for name, shape in LIGHTNING.items()} | DENSE,
    "full, dense, plain, fused": NORMS
    | {"attention.query_key_value.weight": [24, 8], "attention.dense.weight": [8, 8]}
    | DENSE,
    "latent, routed, plain, two in a layer": NORMS
    | {f"self_attn.{n}.{part}_proj.weight": [8, 8] for n in (0, 1) for part in ("kv_b", "q_b", "o")}
    | {f"self_attn.{n}.kv_a_proj_with_mqa.weight": [8, 8] for n in (0, 1)}
    | {f"mlps.{n}.{part}_proj.weight": [8, 8] for n in (0, 1) for part in ("gate", "up", "down")}
    | {"mlp.experts.0.gate_proj.weight": [8, 8]},
}


def made(tensors, **config):
    headers = {
        name: TensorHeader(dtype, tuple(shape), "model.safetensors", 0, skeleton.size(shape, dtype))
        for name, (shape, dtype) in sorted(tensors.items())
    }
    quantization = config.get("quantization_config", {})
    return classify(
        Checkpoint(
            path=skeleton.DATA,
            config=config,
            generation_config={},
            headers=headers,
            quantization=quantization,
            tokenizer=[],
            remote_code=[],
        )
    )


@pytest.mark.parametrize("prefix", ["model.layers.", "layers.", "language_model.model.layers.", "backbone.layers."])
@pytest.mark.parametrize("kind", KINDS)
def test_kinds(kind, prefix):
    found = made(
        {f"{prefix}{layer}.{name}": (shape, "BF16") for layer in (0, 1) for name, shape in KINDS[kind].items()}
    )
    (run,) = found.layers
    assert run.layers == "0-1"
    assert [run.mixer, run.ffn, run.residual] == kind.split(", ")[:3]
    assert found.unaccounted == []


def test_a_hybrid_pattern_is_held_against_the_tensors():
    parts = {"M": KINDS["state-space, none, plain"], "*": KINDS["full, none, plain"], "E": KINDS["none, routed, plain"]}
    layers = {f"backbone.layers.{n}.{name}": (s, "BF16") for n, p in enumerate("MEM*E") for name, s in parts[p].items()}
    found = made(layers, num_hidden_layers=5, hybrid_override_pattern="MEM*E")
    assert found.layer_counts() == {
        "mixer": {"state-space": 2, "none": 2, "full": 1},
        "ffn": {"none": 3, "routed": 2},
    }
    assert not [finding for finding in found.findings if "pattern" in finding.what]
    wrong = made(layers, num_hidden_layers=5, hybrid_override_pattern="MEME*")
    assert any("hybrid_override_pattern does not fit" in finding.what for finding in wrong.findings)


def test_windows_from_the_config_alone():
    layers = {f"model.layers.{n}.{name}": (s, "BF16") for n in range(6) for name, s in (ATTENTION | DENSE).items()}

    def mixers(**config):
        return made(layers, num_hidden_layers=6, **config).layer_counts()["mixer"]

    assert mixers() == {"full": 6}
    assert mixers(sliding_window=16) == {"sliding": 6}
    assert mixers(sliding_window=16, use_sliding_window=False) == {"full": 6}
    assert mixers(sliding_window=16, use_sliding_window=True, max_window_layers=2) == {"full": 2, "sliding": 4}
    assert mixers(sliding_window=16, sliding_window_pattern=3) == {"sliding": 4, "full": 2}
    types = ["sliding_attention", "full_attention"] * 3
    assert mixers(sliding_window=16, layer_types=types) == {"sliding": 3, "full": 3}
    assert mixers(sliding_window=None, layer_types=["linear_attention"] * 6) == {"full": 6}


FORMATS = {
    "fp8_block": {"weight": ([256, 256], "F8_E4M3"), "weight_scale_inv": ([2, 2], "F32")},
    "fp8_ue8m0": {"weight": ([256, 256], "F8_E4M3"), "scale": ([2, 2], "F8_E8M0")},
    "mxfp8": {"weight": ([256, 256], "F8_E4M3"), "weight_scale": ([256, 8], "U8")},
    "mxfp4_packed": {"weight_packed": ([256, 128], "U8"), "weight_scale": ([256, 8], "U8")},
    "int4_packed": {
        "weight_packed": ([256, 32], "I32"),
        "weight_scale": ([256, 8], "BF16"),
        "weight_shape": ([2], "I64"),
    },
    "nvfp4": {
        "weight": ([256, 128], "U8"),
        "weight_scale": ([256, 16], "F8_E4M3"),
        "weight_scale_2": ([], "F32"),
    },
}


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name):
    tensors = {f"layers.0.mlp.experts.{e}.w1.{part}": held for e in range(3) for part, held in FORMATS[name].items()}
    found = made(tensors, quantization_config={"quant_method": name})
    (codes,) = [group for group in found.groups if group.format]
    assert (codes.format, codes.logical_shape, found.parameters) == (name, [256, 256], 3 * 256 * 256)
    assert len(codes.parts) == len(FORMATS[name])
    assert {group.role for group in found.groups} == {"expert"}
    assert not [finding for finding in found.findings if finding.kind == "damage"]


def test_scales_that_do_not_fit():
    found = made({"a.w1.weight": ([256, 256], "F8_E4M3"), "a.w1.weight_scale_inv": ([3, 7, 5], "F32")})
    assert any("scales that do not fit" in finding.what for finding in found.findings)


@pytest.mark.parametrize(
    ("listed", "plain", "kept"),
    [
        (["re:.*self_attn.*"], [], []),
        (["re:.*mlp\\.(gate|up)_proj.*"], ["self_attn.q_proj.weight"], []),
        (["model.layers.*.self_attn"], [], []),
        (["self_attn", "down_proj"], [], ["mlp.down_proj.weight"]),
        (["re:(a+)+$", "re:(((((", "*q*p*" * 50, "x" * 1000, "re:.*" * 9], ["self_attn.q_proj.weight"], []),
    ],
)
def test_the_list_of_exceptions(listed, plain, kept):
    tensors = {"model.layers.0.self_attn.q_proj.weight": ([8, 8], "BF16")}
    for part, held in FORMATS["fp8_block"].items():
        tensors[f"model.layers.0.mlp.down_proj.{part}"] = held
    found = made(tensors, quantization_config={"quant_method": "fp8", "modules_to_not_convert": listed})
    stored_plain = [f.evidence[0] for f in found.findings if "are stored plain" in f.what]
    assert [text.rsplit(": ", 1)[1] for text in stored_plain] == plain
    assert ["mlp.down_proj.weight" for f in found.findings if "are quantised, and the config excepts" in f.what] == kept
