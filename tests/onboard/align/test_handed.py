"""L1 proves what a model hands to its layers, and what they leave for one another, each by itself."""

import pytest
import torch
from zoo.mutants import argument, looped, specified, wired_again

from dayzero.onboard.align.blocks import blocks_rung, side_by_side
from dayzero.onboard.align.climb import load_shrunk
from dayzero.onboard.align.divergence import first_divergence
from dayzero.onboard.align.handed import layer_inputs_call
from dayzero.onboard.oracle.calls import same

LOOPED = [pytest.mark.slow]
ONE_MORE = looped(passes=lambda count: count + 1)


def package(family, tmp_path, change=lambda spec: spec):
    _, found = specified(family)
    changed = found.model_copy(update={"shrunk": change(found.shrunk)})
    return load_shrunk(changed, tmp_path), found.shrunk_config


def rung(family, tmp_path, change=lambda spec: spec):
    return blocks_rung(*package(family, tmp_path, change))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "lines"),
    [
        ("beam", ["query_scale, for what model.layers.1.self_attn is handed"]),
        (
            "gemma4",
            [
                "layer_inputs, for model",
                "layers.0.residual_scale, for model.layers.0.layer_scalar",
                "layers.0.routing, for model.layers.0.router",
                "layers.0.routing, for model.layers.0.router: 'routing_index', left for layers.0.ffn_2",
                "layers.2.mixer, for model.layers.2.self_attn: 'keys.full_attention', left for layers.3.mixer",
            ],
        ),
        pytest.param(
            "inkling2_loop",
            [
                "loop, which runs layers 2-5 3 times, each from where the first began",
                "layers.2 in pass 3, for model.layers.2, handed other messages",
                "loop.message, for model.message_input",
                "layers.2.mixer_input_2, for model.layers.2.q_message_gate",
                "layers.1.residual, for model.layers.1.attention_input",
                "merge, for model.final_input",
            ],
            marks=LOOPED,
        ),
        pytest.param(
            "mistral_large4",
            ["layers.1.mixer, for model.language_model.layers.1.self_attn: 'selected', left for layers.2.mixer"],
            marks=LOOPED,
        ),
    ],
)
def test_all_that_is_handed_is_compared(family, lines, tmp_path):
    found = rung(family, tmp_path)
    assert found.verdict == "PASS", found.where
    for line in lines:
        assert any(detail.startswith(line + ":") for detail in found.details), (line, found.details)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "change", "named"),
    [
        ("beam", argument("query_scale.length", 2049.0), "query_scale, for what model.layers.1.self_attn is handed"),
        ("gemma4", argument("layer_inputs.scale", 0.5), "layer_inputs, for model: output, captured input misses"),
        ("gemma4", argument("layer_inputs.norm.eps", 1e-5), "layer_inputs, for model: "),
        (
            "gemma4",
            argument("mixer.leaves", None),
            "layers.2.mixer, for model.layers.2.self_attn: 'keys.full_attention' is not left for layers.3.mixer; "
            "layers.2.mixer, for model.layers.2.self_attn: 'values.full_attention' is not left for layers.3.mixer",
        ),
        pytest.param(
            "inkling2_loop",
            argument("loop.message.scale", lambda scale: 1.01 * scale),
            "loop.message, for model.message_input: ",
            marks=LOOPED,
        ),
        pytest.param(
            "inkling2_loop",
            wired_again("mixer_input_2", "residual.1, message.2"),
            "what layers.3.mixer_input_2 in pass 3 reads, 'residual.1, message.2'",
            marks=LOOPED,
        ),
        pytest.param("inkling2_loop", ONE_MORE, "loop, which runs layers 2-5 4 times, each from", marks=LOOPED),
    ],
)
def test_a_mutant_in_it_fails_the_rung_and_nothing_else_is_named(family, change, named, tmp_path):
    found = rung(family, tmp_path, change)
    assert found.verdict == "FAIL"
    assert found.where.startswith(named)
    assert found.where.count(", for ") <= named.count(", for ") + named.startswith("what")


def test_what_makes_the_inputs_of_layers_is_a_function_of_the_embeddings(tmp_path):
    pair = side_by_side(*package("gemma4", tmp_path), seed=3)
    call = layer_inputs_call(pair.calls, "model", "model.layers", pair.ids)
    assert call is not None
    assert call.result.shape == (*pair.ids.shape, 4, 14)
    assert same(call.replay(call.hidden), call.result)
    moved = call.replay(call.hidden + 1.0)
    assert not torch.allclose(moved, call.result)
    assert same(pair.calls["model"].replay_exactly((pair.ids,), {}).last_hidden_state, pair.calls["model"].result)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (argument("mixer_input_2.eps", 1e-4), "layers.2.mixer_input_2 in pass 2 as mixer_input, for "),
        (argument("loop.message.eps", 1e-4), "loop.message in pass 2, for model.message_input"),
        (ONE_MORE, "what loop.message in pass 4 reads"),
        (argument("ffn_input.eps", 1e-4), "layers.0.ffn_input, for model.layers.0.mlp_input"),
    ],
)
def test_the_first_difference_is_of_a_layer_in_a_pass(change, named, tmp_path):
    assert first_divergence(*package("inkling2_loop", tmp_path, change)).startswith(named)
    assert first_divergence(*package("inkling2_loop", tmp_path / "right")) == ""
