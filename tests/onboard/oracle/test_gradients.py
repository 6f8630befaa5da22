"""Gradients of code that overwrites what they need: those that it would have if it did not."""

import pytest
import torch
from zoo import families

from dayzero.onboard.candidates import site_of
from dayzero.onboard.oracle import reference
from dayzero.onboard.oracle.calls import record_calls
from dayzero.onboard.oracle.documents import documents
from dayzero.onboard.oracle.gradients import as_trained, gradients, overwrites
from dayzero.onboard.prove.block import prove


def overwriting(x, scale):
    weights = torch.softmax(scale * x, -1)
    weights /= weights.sum(-1, keepdim=True) + 0.5
    return weights.square().sum()


def plain(x, scale):
    weights = torch.softmax(scale * x, -1)
    weights = weights / (weights.sum(-1, keepdim=True) + 0.5)
    return weights.square().sum()


def inputs():
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randn(3, 5, generator=generator, dtype=torch.float64), torch.tensor(1.7, dtype=torch.float64)
    return [one.requires_grad_() for one in drawn]


def test_what_is_overwritten_has_the_gradients_of_what_is_not():
    held = inputs()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        as_trained(lambda: overwriting(*held), held)
    output, found = gradients(lambda: overwriting(*held), held)
    same, wanted = as_trained(lambda: plain(*held), held)
    assert torch.equal(output, same)
    assert all(torch.allclose(a, b, rtol=1e-14, atol=0) for a, b in zip(found, wanted, strict=True))
    assert all(bool(one.any()) for one in wanted)


def test_what_is_not_reached_has_none_and_what_fails_otherwise_fails():
    x, unused = inputs()
    _, found = gradients(lambda: x.sum(), [x, unused])
    assert [float(one.sum()) for one in found] == [15.0, 0.0]
    with pytest.raises(RuntimeError, match="does not require grad"):
        gradients(lambda: x.detach().sum(), [x])


def test_what_a_reference_overwrites_is_said():
    model, _ = reference.build({**families.config("doge"), "norm_topk_prob": True})
    ids = torch.randint(3, 190, (2, 24), generator=torch.Generator().manual_seed(1))
    assert overwrites(model, ids) == (
        "DogeForCausalLM overwrites output 0 of Softmax, which its backward pass needs, and fails in training: "
        "given a copy here"
    )
    usual, _ = reference.build(families.config("doge"))
    assert overwrites(usual, ids) == ""


def test_experts_whose_weights_are_overwritten_are_proven_with_their_gradients():
    model, _ = reference.build({**families.config("doge"), "norm_topk_prob": True})
    reference.redraw(model, torch.Generator().manual_seed(0))
    ids = documents(model, 190, families.SEQUENCE, torch.Generator().manual_seed(1))
    calls, _ = record_calls(model, ids)
    site = site_of(calls, "model.layers.0.mlp", model.config)
    best = prove("ffn", site, torch.Generator().manual_seed(2)).survivors[0]
    assert best.error <= 1e-11
    router = best.candidate.spec(site.module, site.config).arguments["router"]
    assert router.arguments["normalise"] is not None
