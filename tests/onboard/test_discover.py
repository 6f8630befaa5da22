import dataclasses

import pytest
import strange
import torch
from torch import nn

from dayzero.onboard.discover import Undiscovered, discover, mixes_tokens, record_calls, same, solve
from dayzero.onboard.reference import Promote, redraw

IDS = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    model = strange.build()
    redraw(model, torch.Generator().manual_seed(0))
    return model


def test_parts_are_found_by_what_flows(model):
    parts = discover(model, IDS)
    assert (parts.embed, parts.layers, parts.norm, parts.head, parts.rotary) == (
        "glyphs", "tower", "calm", "mouth", "spin",
    )  # fmt: skip
    assert [dataclasses.astuple(layer) for layer in parts.layer_parts] == [("zig", "see", "zag", "do")] * 2


def test_recording_leaves_no_hooks_and_keeps_what_was_seen(model):
    calls, logits = record_calls(model, IDS)
    assert not any(module._forward_hooks for module in model.modules())
    with torch.no_grad(), Promote():
        assert torch.equal(model(input_ids=IDS).logits, logits)
        call = calls["tower.1.do"]
        assert torch.equal(call.replay(call.hidden), call.result)
        doubled = call.replay(call.hidden * 2)
    assert not same(doubled, call.result)


def test_the_mixer_is_the_part_whose_tokens_meet(model):
    calls, _ = record_calls(model, IDS)
    assert mixes_tokens(calls["tower.0.see"])
    assert not mixes_tokens(calls["tower.0.do"])
    assert not mixes_tokens(calls["tower.0.zig"])


def wired(model, forward):
    """The model with another way of putting its layers together."""
    for tier in model.tower:
        tier.forward = lambda z, pair, veil, tier=tier: forward(tier, z, pair, veil)
    return model


@pytest.mark.parametrize(
    ("forward", "says"),
    [
        (lambda t, z, p, v: z + t.see(t.zig(z), p, v) + t.do(t.zag(z)), "input of zag"),
        (lambda t, z, p, v: (y := z + 0.5 * t.see(t.zig(z), p, v)) + t.do(t.zag(y)), "0.5 see"),
        (lambda t, z, p, v: (y := z + t.see(t.zig(z), p, v)) + 2 * t.do(t.zag(y)), "output is"),
        (lambda t, z, p, v: (y := t.zig(z + t.see(z, p, v))) + t.do(t.zag(y)), "is fed by"),
        (lambda t, z, p, v: (y := z + t.see(t.zig(z), p, v)) + t.do(y), "1 norms"),
        (lambda t, z, p, v: (y := z + t.see(t.zig(z), p, v)) + t.do(t.zag(y)).tanh(), "no sum"),
    ],
)
def test_another_composition_is_said_not_fitted(model, forward, says):
    with pytest.raises(Undiscovered, match=says):
        discover(wired(model, forward), IDS)


def test_a_changed_stream_between_embedding_and_layers_is_no_plain_decoder(model):
    forward = model.glyphs.forward
    model.glyphs.forward = lambda ids: forward(ids)
    held = type(model).forward

    def scaled(input_ids, use_cache=False):
        model.tower[0].register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:]))
        return held(model, input_ids)

    model.forward = scaled
    with pytest.raises(Undiscovered, match="layers"):
        discover(model, IDS)


def test_scaled_logits_have_no_head(model):
    mouth = model.mouth
    model.mouth = nn.Sequential()
    model.mouth.forward = lambda z: mouth(z) * 3.0
    model.inner = mouth
    with pytest.raises(Undiscovered, match="head"):
        discover(model, IDS)


def test_scaled_rows_are_no_plain_embedding(model):
    """As Gemma's: the scale is inside the module, so that the layers still follow it."""
    forward = model.glyphs.forward
    model.glyphs.forward = lambda ids: forward(ids) * 48**0.5
    with pytest.raises(Undiscovered, match="embedding: what glyphs gives is not the rows of its table"):
        discover(model, IDS)


def test_a_head_with_a_bias_is_no_plain_head(model):
    model.mouth.bias = nn.Parameter(torch.ones(131, dtype=torch.float64))
    with pytest.raises(Undiscovered, match="head: what mouth gives"):
        discover(model, IDS)


def test_a_reference_that_does_not_run_is_said(model):
    model.tower[1].see.pupil = 13
    with pytest.raises(Undiscovered, match="does not run at small sizes"):
        discover(model, IDS)
    assert not any(module._forward_hooks for module in model.modules())


def test_solving_for_coefficients():
    a, b, c = (torch.randn(2, 3, generator=torch.Generator().manual_seed(n), dtype=torch.float64) for n in range(3))
    assert solve(a + 2.5 * b, {"a": a, "b": b, "c": c}) == {"a": 1.0, "b": 2.5}
    assert solve(a * b, {"a": a, "b": b, "c": c}) == {}
    assert solve(a, {"a": a, "other size": torch.ones(4, dtype=torch.float64)}) == {"a": 1.0}


def test_equal_values_whatever_the_leading_dimensions():
    x = torch.arange(12.0).view(3, 4)
    assert same(x, x.view(1, 3, 4))
    assert not same(x, x.view(4, 3))
    assert not same(x, x + 1e-6)
    assert not same(x, x[:2])
