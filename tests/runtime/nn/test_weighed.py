"""Weights of rows inside the experts against weights of their results."""

import pytest
import torch
from drawn import drawn

from dayzero.runtime.nn import Experts, MixtureOfExperts, Router
from dayzero.runtime.nn.weighed import weighed

ROWS, WIDTH = 9, 6


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_the_value_and_both_gradients():
    inner, weights = draw(ROWS, WIDTH).requires_grad_(), draw(ROWS, seed=1).requires_grad_()
    sent = draw(ROWS, WIDTH, seed=2)
    plain = torch.tanh(inner) * weights.unsqueeze(-1)
    found = weighed(torch.tanh, inner, weights)
    assert torch.equal(found, plain)
    for mine, theirs in zip(*(torch.autograd.grad(y, (inner, weights), sent) for y in (found, plain)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("frozen", ["inner", "weights"])
def test_what_is_frozen_has_no_gradient(frozen):
    leaves = {"inner": draw(ROWS, WIDTH), "weights": draw(ROWS, seed=1)}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    weighed(torch.tanh, *leaves.values()).sum().backward()
    assert [name for name, leaf in leaves.items() if leaf.grad is None] == [frozen]


def test_only_the_first_projection_s_result_and_the_weights_are_kept():
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(tuple(t.shape)) or t, lambda t: t):
        weighed(torch.tanh, draw(ROWS, WIDTH).requires_grad_(), draw(ROWS, seed=1).requires_grad_())
    assert sorted(kept) == [(ROWS,), (ROWS, WIDTH)]


@pytest.mark.parametrize(("arguments", "weighs"), [({}, True), ({"is_gated": False}, True), ({"bias": True}, False)])
def test_a_mixture_is_the_same_either_way(arguments, weighs, monkeypatch):
    moe = drawn(MixtureOfExperts(Router(7, 5, 2), Experts(5, 7, 4, "silu", **arguments)))
    assert moe.experts.weighs is weighs
    found = []
    for _ in range(2):
        moe.zero_grad()
        x = draw(11, 7).requires_grad_()
        y = moe(x)
        (y * draw(11, 7, seed=3)).sum().backward()
        found.append([y.detach(), x.grad, *(parameter.grad for parameter in moe.parameters())])
        monkeypatch.setattr(Experts, "weighs", False)
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_experts_that_cannot_weigh_say_so():
    experts = Experts(2, 7, 4, "silu", bias=True)
    with pytest.raises(ValueError, match="weigh no rows"):
        experts(draw(3, 7), torch.tensor([1, 2]), weights=draw(3))
