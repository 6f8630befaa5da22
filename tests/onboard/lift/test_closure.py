"""Classes of references copied with all that they use, and proven to compute what they computed."""

import ast
import re

import lifted_sites
import pytest
import torch
from torch import nn

from dayzero.onboard.candidates.evidence import Candidate, literal, site_of
from dayzero.onboard.candidates.lifted import propose_lifted, why_not
from dayzero.onboard.lift.closure import Lift, LiftError, lift, merge
from dayzero.onboard.lift.lifting import prove_lifted
from dayzero.runtime.nn.lifted_source import IMPORTS, UPSTREAM, check_source, classes_of
from dayzero.runtime.weights import Stored

# Fifteen families that differ: their mixers, feed-forward parts, norms and whole layers are all copied.
FAST = ["mixtral", "qwen3_next", "phimoe"]
SLOW = [
    "deepseek_v4", "gpt_oss", "glm_moe_dsa", "nemotron_h", "kimi_linear", "recurrent_gemma", "xlstm", "doge", "jamba",
    "minimax_m3_vl", "dots3_note", "llama4",
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("family", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_every_module_of_a_layer_is_reproduced(family):
    found = dict(lifted_sites.verdicts(family))
    assert len(found) >= 3
    assert {name: why for name, why in found.items() if why} == {}


@pytest.fixture(scope="module")
def attention():
    """A site of grouped-query attention with a window."""
    return next(site for path, site in lifted_sites.sites("mixtral") if path.endswith("self_attn"))


@pytest.fixture(scope="module")
def layer():
    return next(site for path, site in lifted_sites.sites("mixtral") if path.endswith("layers.0"))


def test_the_source_says_where_it_comes_from_and_imports_only_arithmetic(attention):
    made = lift(type(attention.module))
    text = merge([made])
    assert "# Licensed under the Apache License" in text
    assert "/work" not in text
    for definition in made.definitions:
        first, last = definition.lines
        assert f"# lifted from {definition.file}:{first}-{last}\n" in text
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.ImportFrom):
            assert node.module == UPSTREAM or node.module.split(".")[0] in IMPORTS
    # What serves caches and dispatch is gone; what computes is there.
    assert "past_key_values.update" not in text
    assert "@use_kernel" not in text
    assert {"repeat_kv", "rotate_half"} <= {definition.name for definition in made.definitions}
    assert text == merge([made, made])


def test_a_mask_is_rebuilt_from_the_field_that_it_follows(attention):
    candidate = propose_lifted(attention)[-1]
    handed = candidate.spec(attention.module, attention.config).arguments["handed"]
    assert handed["attention_mask"]["window"] == attention.config.sliding_window == 7
    assert handed["position_embeddings"] == {"table": 0, "style": "half", "axes": "bsd", "part": "pair"}
    changed = type(attention.config)(**{**attention.config.to_dict(), "sliding_window": 9})
    assert candidate.spec(attention.module, changed).arguments["handed"]["attention_mask"]["window"] == 9


def test_settings_hold_the_fields_that_are_read_and_no_others(attention):
    settings = propose_lifted(attention)[-1].spec(attention.module, attention.config).arguments["settings"]
    held = settings["config"]["namespace"]
    assert held["num_attention_heads"] == attention.config.num_attention_heads
    assert held["_attn_implementation"] == "eager"
    assert "vocab_size" not in held
    assert "intermediate_size" not in held


def test_equal_layers_have_equal_settings():
    sites = {path: site for path, site in lifted_sites.sites("mixtral") if path.endswith("self_attn")}
    (site,) = sites.values()
    model_settings = [
        propose_lifted(site)[-1].spec(module, site.config).arguments["settings"]
        for module in _siblings(site.module)
    ]  # fmt: skip
    assert len(model_settings) == 4
    assert all(settings == model_settings[0] for settings in model_settings)


def _siblings(module: nn.Module) -> list[nn.Module]:
    from dayzero.onboard.oracle.constructed import built_like

    return [other for other, _ in built_like(module)]


def test_a_wrong_copy_is_not_proven(attention, monkeypatch):
    for old, new in (("* scaling", "* scaling * 1.0000001"), ("torch.cat((-x2, x1)", "torch.cat((x2, x1)")):
        good = propose_lifted(attention)[-1]
        bad = Lift(
            good.lift.name,
            tuple(
                type(part)(part.name, part.file, part.lines, part.text.replace(old, new))
                for part in good.lift.definitions
            ),
            good.lift.imports,
            good.lift.licences,
        )
        assert merge([bad]) != merge([good.lift])
        monkeypatch.setattr(good, "lift", bad)
        from dayzero.onboard.prove.block import attempt

        tried = attempt(good, attention, torch.Generator().manual_seed(0), thorough=False)
        assert not tried.proven


def test_proven_blocks_stand_inside_a_copied_layer(layer):
    norm = Candidate(
        "RMSNorm",
        {"width": literal(80, "test"), "eps": literal(layer.config.rms_norm_eps, "test")},
        {"weight": Stored("weight")},
    )
    inside = {"input_layernorm": norm, "post_attention_layernorm": norm}
    proven, _, why = prove_lifted(layer, inside, torch.Generator().manual_seed(0))
    assert proven is not None, why
    spec = proven.candidate.spec(layer.module, layer.config)
    assert spec.arguments["module"].endswith("_around_input_layernorm_post_attention_layernorm")
    block = spec.build(classes_of(merge(proven.candidate.lifts)))
    assert type(block.module.input_layernorm.block).__name__ == "RMSNorm"
    assert not re.search(r"self\.input_layernorm = \w+RMSNorm", merge(proven.candidate.lifts))
    assert type(spec).model_validate_json(spec.model_dump_json()) == spec


def test_an_argument_that_nothing_explains_is_a_reason():
    (site,) = (site for path, site in lifted_sites.sites("zaya") if path.endswith("residual_scale"))
    assert propose_lifted(site) == []
    assert "is handed" in why_not(site)


def test_what_cannot_stand_by_itself_says_why():
    class Inner(nn.Module):
        pass

    with pytest.raises(LiftError, match="inside something else"):
        lift(Inner)


def test_two_definitions_of_one_name_are_not_merged(attention):
    made = lift(type(attention.module))
    other = tuple(type(p)(p.name, "elsewhere.py", p.lines, p.text + "\n# other") for p in made.definitions)
    with pytest.raises(LiftError, match="one thing in"):
        merge([made, Lift(made.name, other, made.imports, made.licences)])


@pytest.mark.parametrize(
    "text",
    ["import os", "from subprocess import run", "from . import x", "eval('1')", "open('x')", "import numpy"],
)
def test_source_that_does_more_than_arithmetic_is_refused(text):
    with pytest.raises(ValueError, match="line 1"):
        check_source(text)
    with pytest.raises(ValueError, match="line 1"):
        classes_of(text)


def test_a_site_without_known_arguments_is_not_lifted(attention):
    from dayzero.onboard.oracle import constructed

    held = constructed._made.pop(attention.module)
    try:
        assert "was constructed is not known" in why_not(site_of({"a": attention.call}, "a", attention.config))
    finally:
        constructed._made[attention.module] = held
