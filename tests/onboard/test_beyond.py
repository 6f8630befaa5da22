"""Checkpoints beyond what can be proven: a list of what is open, exit code 1, and nothing written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers

from dayzero.onboard.reference import quiet

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 8, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 10}
ROUTED = {"moe_intermediate_size": 24, "num_experts_per_tok": 2}
BEYOND = {
    # an architecture whose small sizes must fit together in ways that shrinking does not know
    "DeepseekV3": ({**LATENT, **ROUTED, "n_routed_experts": 4, "n_group": 1, "topk_group": 1}, "config.json"),
    # a mixture with a shared expert beside it
    "Qwen2Moe": ({**ROUTED, "num_experts": 4, "shared_expert_intermediate_size": 20}, "model.layers.0.mlp"),
    # norms of another kind
    "Phimoe": ({"intermediate_size": 24, "num_local_experts": 4}, "model.layers.0.input_layernorm"),
    # no attention at all
    "Mamba": ({"state_size": 4}, "structure"),
}


@pytest.mark.parametrize("family", BEYOND)
def test_the_list_says_where_and_nothing_is_written(family, tmp_path):
    fields, where = BEYOND[family]
    config = getattr(transformers, f"{family}Config")(**SIZES, **fields)
    torch.manual_seed(0)
    with quiet():
        getattr(transformers, f"{family}ForCausalLM")(config).save_pretrained(tmp_path / "checkpoint")
    command = [Path(sys.executable).with_name("onboard"), "checkpoint", "-o", "out", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert (verdict["ok"], verdict["verdict"]) == (False, "UNPROVEN")
    assert where in [item["where"] for item in verdict["unproven"]]
    assert f"not onboarded: {len(verdict['unproven'])} " in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
