"""The whole block: packing, roles, and what its arguments change."""

import pytest
import torch
from recurrences import check_packed, context, drawn

from dayzero.runtime.nn import GatedDeltaNet

SIZES = {"hidden": 20, "heads": 4, "key_heads": 2, "key_dim": 6, "value_dim": 5, "conv_width": 3}
EPS = {"norm_eps": 1e-5, "l2_eps": 1e-6}
KINDS = {
    "a decay a head": {},
    "twice beta, sigmoid gate": {"beta_scale": 2.0, "gate_act": "sigmoid", "conv_bias": True},
    "a decay a channel": {"channel_decay": True, "decay_rank": 3, "gate_rank": 2},
    "bounded": {"channel_decay": True, "bound": -5.0},
}


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_documents_alone(kind):
    check_packed(drawn(GatedDeltaNet(**SIZES, **EPS, **KINDS[kind])), 20)


@pytest.mark.parametrize("kind", KINDS)
def test_float32_stays_finite_at_saturation(kind):
    block = drawn(GatedDeltaNet(**SIZES, **EPS, **KINDS[kind]), gain=3.0, dtype=torch.float32)
    x = 30 * torch.randn(40, 20, generator=torch.Generator().manual_seed(1))
    x.requires_grad_(True)
    out = block(x, context((40,)))
    out.square().mean().backward()
    assert bool(out.isfinite().all())
    assert bool(x.grad.isfinite().all())
    assert all(bool(p.grad.isfinite().all()) for p in block.parameters())


def test_bfloat16_is_near_float32():
    block = drawn(GatedDeltaNet(**SIZES, **EPS), dtype=torch.float32)
    x = torch.randn(40, 20, generator=torch.Generator().manual_seed(1))
    want = block(x, context((25, 15)))
    got = block.bfloat16()(x.bfloat16(), context((25, 15)))
    assert got.dtype == torch.bfloat16
    assert float(((got - want).norm() / want.norm()).detach()) < 0.05


def test_bounded_decays_never_pass_the_bound():
    block = drawn(GatedDeltaNet(**SIZES, **EPS, **KINDS["bounded"]), gain=4.0)
    decay = block._decay(100 * torch.randn(50, 20, dtype=torch.float64), torch.float64)
    assert -5.0 <= float(decay.detach().min()) < -4.9
    assert float(decay.max()) <= 0


def test_initial_values_forget_a_little():
    block = GatedDeltaNet(**SIZES, **EPS)
    block.reset_parameters(0.02)
    kept = block._decay(torch.zeros(1, 20), torch.float32).exp()
    assert 0.15 < float(kept.min()) <= float(kept.max()) < 1.0


def test_key_heads_must_divide_heads():
    with pytest.raises(ValueError, match="4 heads cannot share 3 key heads"):
        GatedDeltaNet(**{**SIZES, "key_heads": 3}, **EPS)


def test_roles_name_children():
    block = GatedDeltaNet(**SIZES, **EPS)
    owned = {name for name, _ in block.named_children()} | {name for name, _ in block.named_parameters(recurse=False)}
    assert set(block.parallel_roles) == owned
    assert set(block.lora_targets) <= owned
