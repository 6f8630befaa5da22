"""Checkpoints that nothing knows are built by rules: the tests know what they were, and compare."""

import json
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from torch.nn.attention import SDPBackend, sdpa_kernel

from dayzero.onboard.align import coverage_rung
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.oracle.reference import build, run
from dayzero.onboard.prove.block import relative_error
from dayzero.onboard.prove.proven import NotProven
from dayzero.onboard.specify_checkpoint import specify_checkpoint
from dayzero.runtime.quantisation import FORMATS, decode, encode
from dayzero.runtime.safetensors_reader import SafetensorsReader
from dayzero.runtime.weights import bind

SHAPE = {**tiny._SHAPE, **tiny._HEADS, "intermediate_size": 56}
ROUTED = {"moe_intermediate_size": 32, "num_experts_per_tok": 2, "norm_topk_prob": True}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 32}
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}  # fmt: skip
# What the checkpoint is -> (its family, fields of its own, fields that its config.json gets beside them).
CASES: dict[str, tuple[str, dict, dict]] = {
    "norms of queries and keys": ("qwen3", {**SHAPE, "tie_word_embeddings": True}, {}),
    "windows in some layers": (
        "qwen3",
        {**SHAPE, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1, "layer_types": None},
        {},
    ),
    "biases, llama3 positions": ("llama", {**SHAPE, "attention_bias": True, "rope_parameters": LLAMA3}, {}),
    "yarn positions, another activation": ("llama", {**SHAPE, "hidden_act": "gelu", "rope_parameters": YARN}, {}),
    "experts under w1, w2, w3": (
        "mixtral",
        {**tiny.FAMILIES["mixtral"], "sliding_window": 5},
        {"norm_topk_prob": True},
    ),
    "experts beside a gated shared one": (
        "qwen2_moe",
        {**SHAPE, **ROUTED, "num_experts": 6, "shared_expert_intermediate_size": 48, "head_dim": None,
         "hidden_size": 48, "decoder_sparse_step": 2, "norm_topk_prob": False},
        {},
    ),
    "sigmoids and a correction bias": (
        "glm4_moe",
        {**SHAPE, **ROUTED, "n_routed_experts": 6, "n_shared_experts": 2, "first_k_dense_replace": 1,
         "routed_scaling_factor": 1.7, "num_nextn_predict_layers": 0},
        {},
    ),
    "norms over all heads": ("olmoe", {**tiny.FAMILIES["olmoe"], "norm_topk_prob": False}, {}),
}  # fmt: skip


def novel(folder: Path, family: str, fields: dict, more: dict) -> tuple[Path, dict]:
    """A checkpoint under a name that nothing knows, and the config by which its own model is built."""
    tiny.FAMILIES.setdefault(family, {})
    tiny.make(family, folder, tokenizer=False, **{name: value for name, value in fields.items() if value is not None})
    known = json.loads((folder / "config.json").read_text())
    renamed = {**known, **more, "architectures": ["NovelForCausalLM"], "model_type": "novel"}
    (folder / "config.json").write_text(json.dumps(renamed))
    return folder, known


def undecided(folder: Path, **decisions) -> dict[str, str]:
    """What rules leave open: where -> why; without the reason for which there is no reference."""
    with pytest.raises(NotProven) as refused:
        specify_checkpoint(read_checkpoint(folder), "made", decisions, lambda line: None)
    first, *rest = refused.value.unproven
    assert "transformers has no model_type 'novel'" in first.why
    assert "--trust-remote-code" in first.todo
    return {item.where: item.why for item in rest}


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_model_that_it_was(case, tmp_path):
    from transformers import AutoModelForCausalLM

    family, fields, more = CASES[case]
    folder, known = novel(tmp_path / "novel", family, fields, more)
    checkpoint = read_checkpoint(folder)
    specification, ledger = specify_checkpoint(checkpoint, "made", {}, lambda line: None)
    assert specification.unverified == "transformers has no model_type 'novel'"
    assert {block.proof.status for block in specification.spec.blocks() if block.proof} == {"unverified"}
    rung, _ = coverage_rung(checkpoint, ledger, specification.spec)
    assert (rung.verdict, rung.worst, ledger.unaccounted) == ("PASS", 0.0, [])

    (folder / "config.json").write_text(json.dumps(known))
    reference, _ = build(known)
    reference.load_state_dict(AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).state_dict())
    ours, shapes = specification.spec.build(), {name: header.shape for name, header in checkpoint.headers.items()}
    reader, held = SafetensorsReader(folder), {}
    for parameter, rule in bind([rule.build() for rule in specification.spec.rules]).items():
        held[parameter] = rule.read(reader, shapes).double()
    ours.load_state_dict(held)
    ids = torch.randint(0, known["vocab_size"], (2, 24), generator=torch.Generator().manual_seed(0))
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        logits = ours.double().eval()(ids.flatten(), torch.tensor([0, 24, 48])).view(2, 24, -1)
        assert relative_error(logits, run(reference, ids)) <= 1e-9


def test_what_rules_took_for_granted_is_evidence(tmp_path):
    folder, _ = novel(tmp_path / "novel", *CASES["sigmoids and a correction bias"])
    specification, _ = specify_checkpoint(read_checkpoint(folder), "made", {}, lambda line: None)
    proofs = [block.proof for block in specification.spec.blocks() if block.proof is not None]
    evidence = {proof.module: proof.evidence for proof in proofs}
    routed = evidence["model.layers.{layer}.mlp"]
    assert "assumed: scores are sigmoids, since a correction bias is stored and no field says" in routed
    assert "weights scaled from routed_scaling_factor=1.7" in routed
    assert "assumed: the first 6 of 12 channels turn" in evidence["config.json"]


def test_quantised_experts_under_another_prefix_beside_a_tower(tmp_path):
    family, fields, more = CASES["experts under w1, w2, w3"]
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    folder, known = novel(tmp_path / "novel", family, {**fields, **sizes, "dtype": torch.bfloat16}, more)
    stored, values = {"vision_tower.patch.weight": torch.ones(4, 3)}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        name, (rows, columns) = f"language_model.{name}", (*tensor.shape, 0)[:2]
        if ".experts." not in name:
            stored[name] = tensor
            continue
        zeros = {"packed": (rows, columns // 2), "scale": (rows, columns // 32)}
        like = {role: torch.zeros(shape, dtype=torch.uint8) for role, shape in zeros.items()}
        parts, _ = encode(FORMATS["mxfp4_packed"], tensor.float(), like)
        values[name] = decode(FORMATS["mxfp4_packed"], parts)
        stored |= {f"{name}_{role}": part for role, part in parts.items()}
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    text = {**known, **more, "model_type": "novel_text"}
    config = {"architectures": ["NovelForVision"], "model_type": "novel", "text_config": text, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    checkpoint = read_checkpoint(folder)
    specification, ledger = specify_checkpoint(checkpoint, "made", {}, lambda line: None)
    rung, _ = coverage_rung(checkpoint, ledger, specification.spec)
    assert (rung.verdict, rung.worst) == ("PASS", 0.0)
    assert {g.pattern: g.fate for g in ledger.groups if g.part == "vision"} == {"vision_tower.patch.weight": "carried"}
    rule = bind([rule.build() for rule in specification.spec.rules])["layers.1.ffn.experts.down"]
    read = rule.read(SafetensorsReader(folder), {name: header.shape for name, header in checkpoint.headers.items()})
    down = "language_model.model.layers.1.block_sparse_moe.experts.{}.w2.weight"
    assert torch.equal(read.float(), torch.stack([values[down.format(expert)] for expert in range(6)]))


def test_keys_and_values_from_one_latent_are_refused(tmp_path):
    folder, _ = novel(tmp_path / "novel", "deepseek_v3", {
        **tiny._SHAPE, **ROUTED, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4,
        "n_routed_experts": 6, "n_group": 1, "topk_group": 1, "q_lora_rank": 20, "kv_lora_rank": 16,
        "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 10, "first_k_dense_replace": 1,
    }, {})  # fmt: skip
    found = undecided(folder)
    assert list(found) == ["layers 0", "layers 1"]
    assert "latent mixer" in found["layers 0"]
    assert "self_attn.kv_a_proj_with_mqa.weight" in found["layers 0"]


def test_a_tensor_that_no_rule_knows_is_refused(tmp_path):
    folder, _ = novel(tmp_path / "novel", *CASES["norms of queries and keys"])
    file = folder / "model.safetensors"
    more = {f"model.layers.{layer}.self_attn.temper": torch.ones(4) for layer in range(3)}
    save_file({**load_file(file), **more}, file, {"format": "pt"})
    found = undecided(folder)
    assert found == {"model.layers.{layer}.self_attn.temper": "[4], of no known role: no rule says what it computes"}


@pytest.mark.parametrize(
    ("changes", "where", "why"),
    [
        ({"wobble": 3}, "config.json: wobble", "no rule knows what this field changes"),
        ({"attn_logit_softcapping": 30.0}, "config.json: attn_logit_softcapping", "it changes the attention"),
        ({"hidden_act": None}, "config.json: hidden_act", "no field says it, expected one of silu"),
        ({"rms_norm_eps": None, "norm_eps": 1e-6}, "config.json: rms_norm_eps", "no field says it"),
        ({"rope_parameters": None}, "config.json: rope_theta", "no field says it"),
        ({"attention_bias": True}, "config.json: attention_bias", "tensors of a query bias are not there"),
        ({"num_attention_heads": 8}, "model.layers.{layer}.self_attn", "config.json says head_dim=12"),
        ({"num_attention_heads": 5}, "model.layers.{layer}.self_attn", "are not 5 heads that share keys and values"),
        ({"intermediate_size": 64}, "model.layers.{layer}.mlp", "shows 56, and config.json says intermediate_size=64"),
        ({"local_rope": {"rope_theta": 1e4}}, "config.json: local_rope.rope_theta", "it changes the rotary positions"),
        ({"moe_topk": 4, "num_experts_per_tok": 2}, "config.json: num_experts_per_tok and moe_topk", "they disagree"),
        ({"num_experts": 8}, "config.json: num_experts=8", "no layer has routed experts"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 5}, "config.json: layer_types", "of the 3 layers"),
        ({"layer_types": ["sliding_attention"] * 3}, "config.json: sliding_window", "no field says it"),
        ({"layer_types": None, "use_sliding_window": None, "sliding_window": 5},
         "config.json: max_window_layers", "28, and no use_sliding_window"),
        ({"sliding_window": "wide", "use_sliding_window": True}, "config.json: sliding_window", "'wide'"),
        ({"partial_rotary_factor": 0.5, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 1.0}},
         "config.json: partial_rotary_factor", "0.5, and 1.0 in rope_parameters"),
        ({"num_hidden_layers": 4}, "num_hidden_layers=4, yet only 3 of these layers have tensors", "they are 0-2"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1e4}}, "config.json: rope_parameters.rope_type", ""),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mscale": 2.0}},
         "config.json: rope_parameters.mscale", "no rule for default positions reads it"),
        ({"layer_types": ["full_attention", "chunked_attention", "full_attention"], "sliding_window": 5},
         "config.json: layer_types", "no rule for chunked_attention"),
    ],
)  # fmt: skip
def test_a_field_that_rules_cannot_follow_is_refused(changes, where, why, tmp_path):
    folder, _ = novel(tmp_path / "novel", *CASES["norms of queries and keys"])
    config = {**json.loads((folder / "config.json").read_text()), **changes}
    (folder / "config.json").write_text(json.dumps(config))
    found = [said for place, said in undecided(folder).items() if place.startswith(where)]
    assert any(why in said for said in found), found


def test_a_field_that_a_person_accepts_is_left_alone(tmp_path):
    folder, _ = novel(tmp_path / "novel", *{**CASES}["norms of queries and keys"][:2], {"wobble": 3})
    assert list(undecided(folder)) == ["config.json: wobble"]
    decisions = {"ignore_config": {"wobble": "read by the tokenizer"}}
    specification, _ = specify_checkpoint(read_checkpoint(folder), "made", decisions, lambda line: None)
    assert specification.unverified


def test_norms_that_may_be_distances_from_one_are_refused(tmp_path):
    folder, _ = novel(tmp_path / "novel", *CASES["norms of queries and keys"])
    file = folder / "model.safetensors"
    tensors = {name: t - 1 if "layernorm" in name else t for name, t in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})
    found = undecided(folder)
    assert list(found) == [f"model.layers.0.{name}.weight" for name in ("input_layernorm", "post_attention_layernorm")]
    assert all("it may be stored as its distance from 1" in why for why in found.values())
