"""What joins several values is found by what it does, under names of no meaning."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dayzero.onboard.candidates.evidence import Site
from dayzero.onboard.oracle.calls import Call
from dayzero.onboard.prove.block import prove
from dayzero.onboard.structure.several import several

GENERATOR = torch.Generator().manual_seed(0)
CONFIG = SimpleNamespace(to_dict=dict)


def random(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def proven(module, *inputs):
    module = module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(random(*parameter.shape))
        output = module(*inputs)
    call = Call("a", module, inputs, {}, output)
    joined = isinstance(output, tuple)
    site = Site(several(call, range(len(inputs)), joined=joined), {}, CONFIG)
    return [attempt.candidate for attempt in prove("join", site, torch.Generator().manual_seed(1)).survivors]


class Look(nn.Module):
    """Attention over depth, of a stack and one more value."""

    def __init__(self, width, wide=1, weighted=True, normed=False, by=1.0, tampered=False):
        super().__init__()
        self.q = nn.Parameter(torch.empty(wide, width))
        self.g = nn.Parameter(torch.empty(width)) if weighted else None
        self.normed, self.by, self.tampered, self.tiny = normed, by, tampered, 1e-5

    def forward(self, stack, last):
        held = torch.cat([stack, last[:, :, None]], 2)
        keys = held * torch.rsqrt(held.pow(2).mean(-1, keepdim=True) + self.tiny)
        keys = keys if self.g is None else keys * self.g
        weights = (keys @ self.q.t() * self.by).softmax(2)
        if self.tampered:
            weights = weights.flip(2)
        mixed = weights.transpose(2, 3) @ (keys if self.normed else held)
        return mixed.unbind(2) if len(self.q) > 1 else mixed[:, :, 0]


@pytest.mark.parametrize(
    ("made", "claims"),
    [
        ({}, {"weighted": True, "normed_values": False, "scale": 1.0, "queries": 1}),
        ({"weighted": False, "normed": True}, {"weighted": False, "normed_values": True, "scale": 1.0}),
        ({"weighted": False, "normed": True, "by": 7**-0.5, "wide": 3}, {"scale": 7**-0.5, "queries": 3}),
    ],
    ids=["raw values, a norm weight", "normed values", "three queries, a scale"],
)
def test_attention_over_depth(made, claims):
    module = Look(7, **made)
    found = proven(module, random(2, 5, 3, 7), random(2, 5, 7))
    assert [candidate.block for candidate in found] == ["AttentionResidual"]
    arguments = found[0].spec(module, CONFIG).arguments
    assert {name: arguments[name] for name in claims} == claims
    assert arguments["eps"] == 1e-5


def test_attention_over_nothing_but_the_stream():
    assert proven(Look(7, weighted=False, normed=True), random(2, 5, 0, 7), random(2, 5, 7))


def test_attention_that_weighs_others_is_not_proven():
    assert proven(Look(7, tampered=True), random(2, 5, 3, 7), random(2, 5, 7)) == []


class Valve(nn.Module):
    def __init__(self, width, first, least=1e-3):
        super().__init__()
        self.v, self.heat, self.first, self.least = nn.Parameter(torch.empty(width)), 1.3, first, least

    def forward(self, a, b):
        x, branch = (b, a) if self.first else (a, b)
        beta = torch.sigmoid(self.v / self.heat)
        alpha = torch.sqrt(torch.clamp(torch.sigmoid(-self.v / self.heat) * (1.0 + beta), min=self.least))
        return alpha * x + beta * branch


@pytest.mark.parametrize("first", [False, True])
def test_a_gate_between_stream_and_branch(first):
    module = Valve(6, first)
    found = proven(module, random(2, 5, 6), random(2, 5, 6))
    assert [candidate.spec(module, CONFIG).arguments for candidate in found] == [
        {"hidden": 6, "temperature": 1.3, "eps": 1e-3, "branch_first": first}
    ]
    module.heat = 2.0
    assert found[0].spec(module, CONFIG).arguments["temperature"] == 2.0


class Shifts(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.d, self.c, self.b, self.a = (nn.Parameter(torch.empty(width)) for _ in range(4))

    def forward(self, one, two):
        return (one + self.a) * self.c + (two + self.d) * self.b


def test_an_affine_sum_of_two():
    found = proven(Shifts(6), random(2, 5, 6), random(2, 5, 6))
    assert {name: str(next(iter(source.names({})))) for name, source in found[0].parameters.items()} == {
        "first.bias": "a",
        "first.weight": "c",
        "second.bias": "d",
        "second.weight": "b",
    }
    assert len(found) == 1
