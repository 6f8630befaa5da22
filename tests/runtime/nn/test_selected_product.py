"""The selected logits of a router: their gradients against those of the whole product."""

import pytest
import torch
from drawn import drawn

from dayzero.runtime.nn import Normalise, Router, selected_product
from dayzero.runtime.nn.selection import GroupLimit

TOKENS, EXPERTS, HIDDEN, TOP_K = 13, 7, 5, 3


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("bags", [True, False])
def test_gradients_are_those_of_the_whole_product(bags, monkeypatch):
    if not bags:
        monkeypatch.setattr(selected_product, "_WITH_BAGS", ())
    x, weight = draw(TOKENS, HIDDEN).requires_grad_(), draw(EXPERTS, HIDDEN, seed=1).requires_grad_()
    # Experts 5 and 6 have no token, one token has an expert twice, as a table of experts may.
    index = torch.randint(0, 5, (TOKENS, TOP_K), generator=torch.Generator().manual_seed(2))
    index[0] = index[0, 0]
    sent = draw(TOKENS, TOP_K, seed=3)
    product = x @ weight.T
    whole = torch.autograd.grad((product.gather(-1, index) * sent).sum(), (x, weight))
    picked = selected_product.selected_product(x, weight, product.detach(), index)
    assert torch.equal(picked, product.gather(-1, index))
    ours = torch.autograd.grad((picked * sent).sum(), (x, weight))
    for mine, theirs in zip(ours, whole, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-14)
    assert not ours[1][5:].any()


@pytest.mark.parametrize("frozen", ["x", "weight"])
def test_what_is_frozen_has_no_gradient(frozen):
    tensors = {"x": draw(TOKENS, HIDDEN), "weight": draw(EXPERTS, HIDDEN, seed=1)}
    for name, tensor in tensors.items():
        tensor.requires_grad_(name != frozen)
    x, weight = tensors.values()
    product = (x @ weight.T).detach()
    selected_product.selected_product(x, weight, product, product.topk(TOP_K).indices).sum().backward()
    assert [name for name, tensor in tensors.items() if tensor.grad is not None] == [
        name for name in tensors if name != frozen
    ]


@pytest.mark.parametrize(
    ("arguments", "selected_only"),
    [
        ({"normalise": Normalise()}, True),
        ({"normalise": Normalise(), "logit_scale": 1.5, "logit_softcap": 2.0, "logit_bias": True}, True),
        ({"score": "sigmoid", "normalise": Normalise(1e-20), "selection_bias": True, "scale": 2.5}, True),
        ({"score": "sqrtsoftplus", "limit": GroupLimit(2, 1)}, True),
        ({"scored": "selected", "expert_scale": True}, True),
        ({"normalise": Normalise(eps=1e-3)}, False),
        ({"normalise": Normalise(minimum=1e-9)}, False),
        ({"normalise": Normalise(order=2.0)}, False),
        ({}, False),
    ],
)
def test_a_router_has_the_gradients_of_all_its_logits(arguments, selected_only, monkeypatch):
    router = drawn(Router(HIDDEN, EXPERTS + 1, TOP_K, **arguments))
    assert router._weighs_selected_only() is selected_only
    found = []
    for _ in range(2):
        x = draw(TOKENS, HIDDEN).requires_grad_()
        router.zero_grad()
        weights, index = router(x)
        (weights * draw(TOKENS, TOP_K, seed=3)).sum().backward()
        found.append([weights.detach(), index, x.grad, *(p.grad for p in router.parameters())])
        monkeypatch.setattr(Router, "_weighs_selected_only", lambda self: False)
    assert torch.equal(found[0][1], found[1][1])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-12, atol=1e-14)


def test_nothing_of_all_experts_is_kept_for_the_backward_pass():
    router = drawn(Router(HIDDEN, 896, TOP_K, normalise=Normalise()))
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        router(draw(TOKENS, HIDDEN).requires_grad_())
    assert max(kept) == router.weight.numel()  # and not TOKENS * 896
