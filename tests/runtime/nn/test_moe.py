"""Mixtures, their surroundings and their gates against plain loops over tokens and experts; packing is exact."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from drawn import context_for, drawn
from torch.utils._python_dispatch import TorchDispatchMode

from dayzero.runtime.nn import (
    ClampedGLU,
    Experts,
    FeedForward,
    GatedFeedForward,
    JointRouter,
    LayerNorm,
    MixtureOfExperts,
    Normalise,
    OaiSwiGLU,
    RMSNorm,
    Router,
    ScaledFirstRMSNorm,
    SelfGatedRMSNorm,
    SoftcappedGLU,
    TopOneRouter,
)
from dayzero.runtime.nn.norm import GatedRMSNorm

HIDDEN, EXPERTS, WIDTH = 10, 6, 7


class OperatorCalls(TorchDispatchMode):
    """How often each operator is called inside."""

    def __init__(self):
        super().__init__()
        self.seen = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen[func._opname] += 1
        return func(*args, **(kwargs or {}))


def inputs(tokens=9, width=HIDDEN, seed=3):
    return torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def one_expert(experts, x, number, norm=None):
    """What one expert gives for x [H], written out."""
    if experts.is_gated:
        joint = experts.gate_up[number] @ x + (0 if experts.in_bias is None else experts.in_bias[number])
        gate, up = joint.chunk(2)
        inner = F.silu(gate) * up if experts.act == "silu" else experts.act(gate, up)
    else:
        inner = F.relu(experts.up[number] @ x) ** 2
    y = experts.down[number] @ inner + (0 if experts.down_bias is None else experts.down_bias[number])
    return y if norm is None else norm(y)


def by_hand(moe, x, weights, index):
    rows = []
    for token in range(len(x)):
        total = torch.zeros(moe.experts.hidden, dtype=x.dtype)
        for weight, number in zip(weights[token], index[token].tolist(), strict=True):
            if number < moe.experts.experts:
                total = total + weight * one_expert(moe.experts, x[token], number, moe.expert_norm)
            elif moe.spare == "identity":
                total = total + weight * x[token]
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize(
    "experts",
    [
        {"act": "silu"},
        {"act": "silu", "bias": True},
        {"act": "relu2", "is_gated": False},
        {"act": ClampedGLU("silu", 0.5), "bias": True},
        {"act": OaiSwiGLU(1.702, 0.7)},
        {"act": SoftcappedGLU(4.0, 25.0)},
    ],
    ids=str,
)
def test_experts_of_every_form(experts):
    moe = drawn(MixtureOfExperts(Router(HIDDEN, EXPERTS, 2, "sigmoid"), Experts(EXPERTS, HIDDEN, WIDTH, **experts)))
    x = inputs()
    assert torch.allclose(moe(x), by_hand(moe, x, *moe.router(x)), rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("spare", ["zero", "identity"])
@pytest.mark.parametrize("bias", [False, True])
def test_classes_without_an_expert(spare, bias):
    moe = drawn(
        MixtureOfExperts(
            Router(HIDDEN, EXPERTS + 3, 3), Experts(EXPERTS, HIDDEN, WIDTH, "silu", bias=bias), spare=spare
        )
    )
    x = inputs()
    weights, index = moe.router(x)
    assert bool((index >= EXPERTS).any())
    assert bool((index < EXPERTS).any())
    assert torch.allclose(moe(x), by_hand(moe, x, weights, index), rtol=1e-11, atol=1e-12)
    assert moe.expert_counts.shape == (EXPERTS,)
    assert int(moe.expert_counts.sum()) == int((index < EXPERTS).sum())


def test_weights_on_the_input():
    moe = drawn(
        MixtureOfExperts(
            Router(HIDDEN, EXPERTS, 2, "sigmoid", "selected"), Experts(EXPERTS, HIDDEN, WIDTH, "silu"), weigh="input"
        )
    )
    x = inputs(1)
    weights, index = moe.router(x)
    want = sum(one_expert(moe.experts, w * x[0], int(i)) for w, i in zip(weights[0], index[0], strict=True))
    assert torch.allclose(moe(x)[0], want, rtol=1e-11)


def test_what_stands_around_the_experts():
    moe = drawn(
        MixtureOfExperts(
            Router(HIDDEN, EXPERTS, 2, normalise=Normalise()),
            Experts(EXPERTS, 4, WIDTH, "silu"),
            shared=FeedForward(HIDDEN, 5, "relu2"),
            shared_gate=True,
            average=True,
            hidden=HIDDEN,
            latent_norm=RMSNorm(4, 1e-6),
            expert_norm=ScaledFirstRMSNorm(4, 1e-5, 1.0),
            routed_norm=RMSNorm(4, 1e-6, 1.0),
            output_norm=RMSNorm(HIDDEN, 1e-6),
            bias=True,
        )
    )
    x = inputs()
    routed = by_hand(moe, moe.latent_norm(moe.into(x)), *moe.router(x))
    shared = torch.sigmoid(x @ moe.gate.weight.T) * moe.shared(x)
    want = moe.output_norm((moe.out_of(moe.routed_norm(routed)) + moe.bias + shared) / 2)
    assert torch.allclose(moe(x), want, rtol=1e-10)


def test_shared_experts_that_the_router_weighs():
    shared = GatedFeedForward(HIDDEN, 2 * 3, "silu", parts=2)
    moe = drawn(
        MixtureOfExperts(JointRouter(HIDDEN, EXPERTS, 2, 2), Experts(EXPERTS, HIDDEN, WIDTH, "silu"), shared=shared)
    )
    x = inputs()
    weights, index = moe.router(x)
    want = by_hand(moe, x, weights[:, :2], index)
    for part in range(2):
        rows = slice(3 * part, 3 * part + 3)
        inner = F.silu(x @ shared.gate.weight[rows].T) * (x @ shared.up.weight[rows].T)
        want = want + weights[:, 2 + part : 3 + part] * (inner @ shared.down.weight[:, rows].T)
    assert torch.allclose(moe(x), want, rtol=1e-10)


def test_packed_documents_are_exact():
    moe = drawn(
        MixtureOfExperts(TopOneRouter(HIDDEN, EXPERTS + 1, capacity=2), Experts(EXPERTS, HIDDEN, WIDTH, "silu"))
    )
    a, b = inputs(8), inputs(5, seed=4)
    assert moe.uses_context
    packed = moe(torch.cat((a, b)), context_for(8, 5))
    alone = torch.cat((moe(a, context_for(8)), moe(b, context_for(5))))
    assert torch.allclose(packed, alone, rtol=1e-12, atol=1e-13)
    assert not torch.allclose(packed, moe(torch.cat((a, b)), context_for(13)))


def test_no_tokens():
    moe = drawn(MixtureOfExperts(Router(HIDDEN, EXPERTS, 2), Experts(EXPERTS, HIDDEN, WIDTH, "silu")))
    assert moe(inputs(0)).shape == (0, HIDDEN)


@pytest.mark.parametrize("frozen", [False, True])
def test_more_experts_are_not_more_operations(frozen):
    """Forward and backward call the same operators as often for 64 experts as for 8: none is called for each expert."""

    def calls(experts):
        moe = MixtureOfExperts(Router(16, experts, 2), Experts(experts, 16, 8, "silu")).float()
        for parameter in moe.parameters():
            torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(0))
        moe.experts.requires_grad_(not frozen)
        x = torch.randn(40, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
        with OperatorCalls() as counted:
            moe(x).sum().backward()
        return counted.seen

    few, many = calls(8), calls(64)
    assert few == many
    assert few["_grouped_mm"] == (4 if frozen else 6)


def test_a_selection_bias_gets_no_gradient_and_no_optimizer():
    moe = drawn(
        MixtureOfExperts(
            Router(HIDDEN, EXPERTS, 2, "sigmoid", selection_bias=True), Experts(EXPERTS, HIDDEN, WIDTH, "silu")
        )
    )
    before = moe.router.selection_bias.clone()
    optimizer = torch.optim.SGD(moe.parameters(), lr=1.0)
    moe(inputs()).square().sum().backward()
    optimizer.step()
    assert torch.equal(moe.router.selection_bias, before)
    assert "router.selection_bias" in moe.state_dict()


def test_gates_by_hand():
    gate = torch.tensor([3.0, -3.0, 0.5], dtype=torch.float64)
    up = torch.tensor([5.0, -5.0, 0.2], dtype=torch.float64)
    silu = F.silu
    before, after = ClampedGLU("silu", 2.0), ClampedGLU("silu", 2.0, after=True)
    assert torch.allclose(before(gate, up), silu(gate.clamp(max=2.0)) * up.clamp(-2, 2))
    assert torch.allclose(after(gate, up), silu(gate).clamp(max=2.0) * up.clamp(-2, 2))
    assert not torch.allclose(before(gate, up), after(gate, up))
    g, u = gate.clamp(max=2.0), up.clamp(-2, 2)
    assert torch.allclose(OaiSwiGLU(1.5, 2.0)(gate, up), g * torch.sigmoid(1.5 * g) * (u + 1))
    soft = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    assert torch.allclose(SoftcappedGLU(4.0, 25.0)(gate, up), soft)


def test_scales_of_a_feed_forward_layer():
    layer = drawn(
        GatedFeedForward(HIDDEN, 5, "gelu_tanh", bias=True, gate_scale=0.5, output_scale=3.0, learned_scale=True)
    )
    x = inputs()
    want = 3.0 * layer.down(F.gelu(0.5 * layer.gate(x), approximate="tanh") * layer.up(x)) * layer.scale
    assert torch.allclose(layer(x), want, rtol=1e-12)


def test_norms_by_hand():
    x = inputs(4, 12)

    def rms(v, eps):
        return v / (v.square().mean(-1, keepdim=True) + eps).sqrt()

    plain, shifted = drawn(RMSNorm(12, 1e-3)), drawn(RMSNorm(12, 1e-3, 1.0))
    assert torch.allclose(plain(x), rms(x, 1e-3) * plain.weight)
    assert torch.allclose(shifted(x), rms(x, 1e-3) * (1 + shifted.weight))
    assert torch.allclose(RMSNorm(12, 1e-3, scaled=False)(x), rms(x, 1e-3))
    grouped = drawn(RMSNorm(12, 1e-3, groups=3))
    assert torch.allclose(grouped(x), rms(x.unflatten(-1, (3, 4)), 1e-3).flatten(-2) * grouped.weight)
    first = drawn(ScaledFirstRMSNorm(12, 1e-3, 1.0))
    assert torch.allclose(first(x), rms(x * (1 + first.weight), 1e-3))
    gated = drawn(SelfGatedRMSNorm(12, 1e-3, 5, "silu"))
    y = rms(x, 1e-3) * gated.norm.weight
    assert torch.allclose(gated(x), y * torch.sigmoid(gated.up(F.silu(gated.down(y)))))
    centred = drawn(LayerNorm(12, 1e-3, bias=True))
    middle = x - x.mean(-1, keepdim=True)
    want = middle / (middle.square().mean(-1, keepdim=True) + 1e-3).sqrt() * centred.weight + centred.bias
    assert torch.allclose(centred(x), want)
    other = inputs(4, 12, seed=8)
    for early in (False, True):
        norm = drawn(GatedRMSNorm(12, 1e-3, gate_first=early, groups=2))
        want = norm.norm(x * F.silu(other)) if early else norm.norm(x) * F.silu(other)
        assert torch.allclose(norm(x, other), want)
