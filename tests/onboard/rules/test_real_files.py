"""Rules for published checkpoints, by their real headers and configs (tests/data): every layout as its owner wrote it.

The values are not there, but every name, shape and dtype is: rules that are found on the shrunk reference must take all
tensors of the real files, each once, and make every parameter of the real model.
"""

import math
from unittest import mock

import pytest
import skeleton
import torch

from dayzero.onboard import specify
from dayzero.onboard.specify_checkpoint import specify_checkpoint
from dayzero.runtime.weights import Cast, Concat, Decoded, Deinterleave, Part, Squeeze, Stack, Stored, Tie

pytestmark = pytest.mark.slow
L, E = "model.layers.{layer}.", "model.layers.{layer}.mlp.experts.{expert}."


def fp8(name):
    return Cast("bfloat16", Decoded("fp8_block", (("weight", name), ("scale", f"{name}_scale_inv"))))


def powers(kind, role, name):
    return Cast("bfloat16", Decoded(kind, ((role, f"{name}.weight"), ("scale", f"{name}.scale"))))


def blocks(name):
    return Cast("bfloat16", Decoded("mxfp4_blocks", (("blocks", f"{name}_blocks"), ("scales", f"{name}_scales"))))


def gated(experts, leaf, gate, up):
    return Stack("expert", experts, Concat(0, (leaf(gate), leaf(up))))


QKVZ = Stored(f"{L}linear_attn.in_proj_qkvz.weight")
# Manifest: tensors that are carried, and some rules: parameter, layer -> expression.
FILES = {
    "DeepSeek-V3.2": (
        None,  # layer 61, numbered past the last one
        {
            ("ffn.experts.gate_up", 3): gated(256, fp8, f"{E}gate_proj.weight", f"{E}up_proj.weight"),
            ("mixer.kv_down.weight", 0): fp8(f"{L}self_attn.kv_a_proj_with_mqa.weight"),
            ("ffn.router.selection_bias", 3): Stored(f"{L}mlp.gate.e_score_correction_bias"),
        },
    ),
    "DeepSeek-V4-Flash": (
        None,
        {
            ("ffn.block.experts.down", 0): Stack(
                "expert", 256, powers("mxfp4_packed", "packed", "layers.{layer}.ffn.experts.{expert}.w2")
            ),
            ("mixer.block.key.weight", 3): powers("fp8_ue8m0", "weight", "layers.{layer}.attn.wkv"),
        },
    ),
    "GLM-5.2-FP8": (None, {("ffn.experts.down", 3): Stack("expert", 256, fp8(f"{E}down_proj.weight"))}),
    "Kimi-Linear-48B-A3B": (
        0,
        {
            ("mixer.A_log", 0): Squeeze((0, 1, 3), Stored(f"{L}self_attn.A_log")),
            ("ffn.gate.weight", 0): Stored(f"{L}mlp.gate_proj.weight"),
            ("ffn.experts.down", 1): Stack("expert", 256, Stored(f"{L}block_sparse_moe.experts.{{expert}}.w2.weight")),
        },
    ),
    "MiniMax-M2.7": (
        0,  # further-token layers are promised, and none is stored
        {("ffn.experts.down", 0): Stack("expert", 256, fp8(f"{L}block_sparse_moe.experts.{{expert}}.w2.weight"))},
    ),
    "Qwen3-Next-80B-A3B": (
        None,
        {
            ("mixer.query.weight", 3): Part(0, 0, 256, Stored(f"{L}self_attn.q_proj.weight"), groups=16),
            ("ffn.experts.gate_up", 0): gated(512, Stored, f"{E}gate_proj.weight", f"{E}up_proj.weight"),
        },
    ),
    "Qwen3.6-35B-A3B": (
        0,
        {("ffn.experts.gate_up", 0): Stored("model.language_model.layers.{layer}.mlp.experts.gate_up_proj")},
    ),
    "gpt-oss-20b": (
        0,
        {
            ("ffn.experts.gate_up", 0): Deinterleave(1, 2, blocks(f"{L}mlp.experts.gate_up_proj")),
            ("ffn.experts.down", 0): blocks(f"{L}mlp.experts.down_proj"),
        },
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_every_tensor_is_taken(name):
    checkpoint = skeleton.checkpoint(name, auto_map=...)  # whose code is not here
    elsewhere = {"ignore_config": dict.fromkeys(checkpoint.config, "varied in other tests")}
    with mock.patch.object(specify, "intervene", return_value=[]):
        specification, ledger = specify_checkpoint(checkpoint, "x", elsewhere, lambda line: None)
    carried, expressions = FILES[name]
    assert ledger.unaccounted == []
    counts = {fate: sum(group.count for group in ledger.groups if group.fate == fate) for fate in ("mapped", "carried")}
    further = sum(group.count for group in ledger.groups if group.part == "mtp")
    assert counts["carried"] == (further if carried is None else carried)
    assert counts["mapped"] == len(checkpoint.headers) - counts["carried"]
    with torch.device("meta"):
        state = specification.spec.build().state_dict()
    assert ledger.mapped_parameters() == sum(math.prod(tensor.shape) for tensor in state.values())
    rules = {}
    for rule in specification.spec.rules:
        built = rule.build()
        for parameter, _ in built.each():
            rules[parameter] = built.source
    assert rules.keys() == state.keys()
    for (parameter, layer), source in expressions.items():
        assert rules[f"layers.{layer}.{parameter}"] == source, parameter
    assert not any(isinstance(source, Tie) for source in rules.values())
