"""Mixers with a state in transformers' own models are proven on our blocks, and what decides their arguments is what
their modules read."""

import functools
import math

import pytest
import torch
from zoo import families

from dayzero.onboard.candidates import site_of
from dayzero.onboard.candidates.causes import changed
from dayzero.onboard.oracle import reference
from dayzero.onboard.oracle.calls import record_calls
from dayzero.onboard.prove.block import TOLERANCE, attempt, prove

# family, where its mixer is, the block; slow where the reference is a long Python loop
MIXERS = [
    ("qwen3_next", "model.layers.0.linear_attn", "GatedDeltaNet"),
    ("mamba2", "backbone.layers.0.mixer", "Mamba2"),
    ("minimax", "model.layers.1.self_attn", "LightningAttention"),
    ("lfm2", "model.layers.0.conv", "GatedShortConvolution"),
    ("recurrent_gemma", "model.layers.0.temporal_block", "RecurrentBlock"),
    ("rwkv", "rwkv.blocks.0.attention", "TimeMix"),
    ("rwkv", "rwkv.blocks.0.feed_forward", "ChannelMix"),
    ("xlstm", "backbone.blocks.0.mlstm_layer", "MLSTM"),
    *(
        pytest.param(family, path, block, marks=pytest.mark.slow)
        for family, path, block in [
            ("olmo_hybrid", "model.layers.0.linear_attn", "GatedDeltaNet"),
            ("falcon_mamba", "backbone.layers.0.mixer", "Mamba"),
            ("qwen3_5", "model.layers.0.linear_attn", "GatedDeltaNet"),
            ("qwen3_5_moe", "model.layers.0.linear_attn", "GatedDeltaNet"),
            ("qwen4_exp", "model.layers.0.linear_attn", "GatedDeltaNet"),
            ("lara_mini", "model.layers.0.linear_attn", "GatedDeltaNet"),
            ("kimi_linear", "model.layers.0.self_attn", "GatedDeltaNet"),
            ("bailing_hybrid", "model.layers.0.self_attn", "GatedDeltaNet"),
            ("glm5_next", "model.language_model.layers.0.self_attn", "GatedDeltaNet"),
            ("bamba", "model.layers.0.mamba", "Mamba2"),
            ("granitemoehybrid", "model.layers.0.mamba", "Mamba2"),
            ("nemotron_h", "model.layers.0.mixer", "Mamba2"),
            ("zamba2", "model.layers.0.mamba", "Mamba2"),
            ("falcon_h1", "model.layers.0.mamba", "Mamba2"),
            ("mamba", "backbone.layers.0.mixer", "Mamba"),
            ("jamba", "model.layers.0.mamba", "Mamba"),
            ("zamba", "model.layers.0.mamba", "Mamba"),
            ("lfm2_moe", "model.layers.0.conv", "GatedShortConvolution"),
            ("lfm3", "model.layers.0.conv", "GatedShortConvolution"),
            ("lfm3_vl", "model.language_model.layers.0.conv", "GatedShortConvolution"),
        ]
    ),
]


@functools.cache
def site(family: str, path: str, **fields):
    config = families.config(family)
    (config.get("text_config") or config).update(fields)
    model, _ = reference.build(config)
    reference.redraw(model, torch.Generator().manual_seed(0))
    ids = torch.randint(3, 190, (2, families.SEQUENCE), generator=torch.Generator().manual_seed(0))
    calls, _ = record_calls(model, ids)
    return site_of(calls, path, model.config.get_text_config())


def proven(found):
    survivors = prove("mixer", found, torch.Generator().manual_seed(1)).survivors
    assert survivors
    return survivors[0]


@pytest.mark.parametrize(("family", "path", "block"), MIXERS)
def test_is_proven(family, path, block):
    survivor = proven(site(family, path))
    assert survivor.candidate.block == block
    assert survivor.error <= TOLERANCE


def test_an_epsilon_of_the_code_is_not_taken_for_a_setting_of_the_same_value():
    found = site("qwen3_next", "model.layers.0.linear_attn")
    candidate = proven(found).candidate
    assert candidate.arguments["norm_eps"].label == "attribute norm.variance_epsilon"
    assert candidate.arguments["l2_eps"].label.startswith("1e-06")
    with changed(found.module.norm, "variance_epsilon", 1e-3):
        again = site_of({"m": found.call}, "m", found.config)
        assert attempt(candidate, again, torch.Generator().manual_seed(1), thorough=False).proven


@pytest.mark.slow
@pytest.mark.parametrize("negative", [False, True])
def test_the_factor_on_beta_follows_its_switch(negative):
    found = site("olmo_hybrid", "model.layers.0.linear_attn", linear_allow_neg_eigval=negative)
    candidate = proven(found).candidate
    with changed(found.module, "allow_neg_eigval", not negative):
        other = candidate.spec(found.module, found.config).arguments["beta_scale"]
    assert candidate.spec(found.module, found.config).arguments["beta_scale"] == (2.0 if negative else 1.0)
    assert other == (1.0 if negative else 2.0) or candidate.arguments["beta_scale"].label.startswith("1.0")


@pytest.mark.slow
def test_limits_factors_and_the_place_of_the_norm():
    fields = {
        "ssm_in_multiplier": 1.25,
        "ssm_multipliers": [1.5, 0.5, 0.7, 1.2, 0.9],
        "mamba_rms_norm": True,
        "mamba_norm_before_gate": True,
        "time_step_limit": [0.3, 1.7],
    }
    config = families.config("falcon_h1") | fields
    model, _ = reference.build(config)
    reference.redraw(model, torch.Generator().manual_seed(0))
    ids = torch.randint(3, 190, (2, families.SEQUENCE), generator=torch.Generator().manual_seed(0))
    calls, _ = record_calls(model, ids)
    candidate = proven(site_of(calls, "model.layers.0.mamba", model.config)).candidate
    arguments = candidate.spec(calls["model.layers.0.mamba"].module, model.config).arguments
    assert arguments["multipliers"] == fields["ssm_multipliers"]
    assert arguments["input_multiplier"] == 1.25
    assert (arguments["time_step_min"], arguments["time_step_max"]) == (0.3, 1.7)
    assert arguments["norm"] == "norm_first"


def test_a_factor_of_one_is_found_all_the_same():
    found = site("falcon_h1", "model.layers.0.mamba")
    arguments = proven(found).candidate.arguments
    assert arguments["input_multiplier"].label == "attribute ssm_in_multiplier"
    assert arguments["multipliers"].label == "config ssm_multipliers"
    assert math.isinf(found.module.time_step_limit[1])
    assert arguments["time_step_max"].resolve(found.module, found.config) is None


def test_the_length_of_a_block_is_no_arithmetic_and_computed_tables_stay():
    found = site("minimax", "model.layers.1.self_attn")
    assert found.block_lengths == {8.0}
    before = found.module.slope_rate.clone()
    reference.redraw(found.module, torch.Generator().manual_seed(5))
    assert torch.equal(found.module.slope_rate, before)
