from types import SimpleNamespace

import pytest
import strange
import torch

from dayzero.onboard.oracle.calls import Call, Undiscovered, record_calls, same
from dayzero.onboard.oracle.reference import Promote, redraw
from dayzero.onboard.structure.discover import Logits, discover
from dayzero.onboard.structure.token_mixing import mixes_tokens

IDS = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    model = strange.build()
    redraw(model, torch.Generator().manual_seed(0))
    return model


def test_parts_are_found_by_what_flows(model):
    parts = discover(model, IDS)
    assert (parts.embed, parts.layers, parts.count, parts.norm, parts.head) == ("glyphs", "tower", 2, "calm", "mouth")
    assert (parts.embed_scale, parts.embed_norm, parts.logits) == (1.0, None, Logits())


def test_recording_leaves_no_hooks_and_keeps_what_was_seen(model):
    calls, logits = record_calls(model, IDS)
    assert not any(module._forward_hooks for module in model.modules())
    with torch.no_grad(), Promote():
        assert torch.equal(model(input_ids=IDS).logits, logits)
        call = calls["tower.1.do"]
        assert torch.equal(call.replay(call.hidden), call.result)
        doubled = call.replay(call.hidden * 2)
    assert not same(doubled, call.result)


def test_what_is_changed_in_place_is_kept_as_it_was(model):
    forward = model.tower[0].forward
    seen = {}

    def in_place(z, pair, veil):
        normed = model.tower[0].zig(z)
        seen["normed"] = normed.clone()
        normed.view(-1).clamp_(-0.1, 0.1)
        result = forward(z, pair, veil)
        seen["z"] = z.clone()
        z.mul_(0.0)
        return result

    model.tower[0].forward = in_place
    calls, _ = record_calls(model, IDS)
    assert torch.equal(calls["tower.0.zig"].result, seen["normed"])
    assert torch.equal(calls["tower.0.zig"].hidden, seen["z"])
    assert torch.equal(calls["tower.0"].hidden, seen["z"])
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_the_mixer_is_the_part_whose_tokens_meet(model):
    calls, _ = record_calls(model, IDS)
    assert mixes_tokens(calls["tower.0.see"])
    assert not mixes_tokens(calls["tower.0.do"])
    assert not mixes_tokens(calls["tower.0.zig"])


def test_a_mixer_may_meet_only_what_earlier_layers_left():
    class Asks(torch.nn.Module):
        def forward(self, hidden, left):
            key, value = left["near"]
            return torch.softmax(hidden @ key[:, 0].mT, -1) @ value[:, 0] if self.looks else hidden.sin()

    hidden, key, value = torch.randn(3, 2, 9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for looks in (True, False):
        module = Asks()
        module.looks = looks
        left = {"near": (key[:, None], value[:, None])}
        call = Call("asks", module, (hidden, left), {}, module(hidden, left))
        assert mixes_tokens(call) == looks
        assert torch.equal(left["near"][0], key[:, None])  # as it was


def test_a_stream_changed_between_embedding_and_layers_is_refused(model):
    held = type(model).forward

    def twisted(input_ids, use_cache=False):
        model.tower[0].register_forward_pre_hook(lambda module, args: (args[0].tanh(), *args[1:]))
        return held(model, input_ids)

    model.forward = twisted
    with pytest.raises(Undiscovered, match="the first layer is not fed the rows of glyphs"):
        discover(model, IDS)


def test_a_scale_between_embedding_and_layers_is_found(model):
    held = type(model).forward

    def scaled(input_ids, use_cache=False):
        model.tower[0].register_forward_pre_hook(lambda module, args: (args[0] * 2.5, *args[1:]))
        return held(model, input_ids)

    model.forward = scaled
    assert discover(model, IDS).embed_scale == 2.5


def test_a_scale_inside_the_embedding_is_found(model):
    forward = model.glyphs.forward
    model.glyphs.forward = lambda ids: forward(ids) * 48**0.5
    assert discover(model, IDS).embed_scale == pytest.approx(48**0.5, rel=1e-12)


@pytest.mark.parametrize("cap", [30.0, 0.7])
def test_capped_logits_are_found(model, cap):
    held = type(model).forward

    def capped(input_ids, use_cache=False):
        output = held(model, input_ids)
        return SimpleNamespace(logits=torch.tanh(output.logits / cap) * cap)

    model.forward = capped
    found = discover(model, IDS).logits
    assert found.softcap == pytest.approx(cap, rel=1e-9)
    assert (found.scale, found.rows) == (1.0, None)


def test_scaled_logits_are_found(model):
    held = type(model).forward
    model.forward = lambda input_ids, use_cache=False: SimpleNamespace(logits=held(model, input_ids).logits / 8.0)
    assert discover(model, IDS).logits == Logits(scale=0.125)


def test_logits_of_a_padded_head_are_its_first_rows(model):
    held = type(model).forward
    model.forward = lambda input_ids, use_cache=False: SimpleNamespace(logits=held(model, input_ids).logits[..., :120])
    assert discover(model, IDS).logits == Logits(rows=120)


def test_logits_that_are_scaled_and_then_capped(model):
    held = type(model).forward
    model.config.cap = 12.5

    def capped(input_ids, use_cache=False):
        return SimpleNamespace(logits=torch.tanh(held(model, input_ids).logits * 0.5 / 12.5) * 12.5)

    model.forward = capped
    assert discover(model, IDS).logits == Logits(scale=0.5, softcap=12.5)


def test_logits_that_are_something_else_have_no_head(model):
    held = type(model).forward
    model.forward = lambda input_ids, use_cache=False: SimpleNamespace(logits=held(model, input_ids).logits.sigmoid())
    with pytest.raises(Undiscovered, match="head"):
        discover(model, IDS)


def test_a_head_that_is_no_product_with_its_matrix_is_refused(model):
    forward = model.mouth.forward
    model.mouth.forward = lambda z: forward(z) + 1.0
    with pytest.raises(Undiscovered, match="head: what mouth gives"):
        discover(model, IDS)


def test_a_reference_that_does_not_run_is_said(model):
    model.tower[1].see.pupil = 13
    with pytest.raises(Undiscovered, match="does not run at small sizes"):
        discover(model, IDS)
    assert not any(module._forward_hooks for module in model.modules())


def test_equal_values_whatever_the_leading_dimensions():
    x = torch.arange(12.0).view(3, 4)
    assert same(x, x.view(1, 3, 4))
    assert not same(x, x.view(4, 3))
    assert not same(x, x + 1e-6)
    assert not same(x, x[:2])
