"""Why a module is copied is said by what the search saw of it: the nearest candidate, or what has no explanation."""

import re

import torch
from torch import nn
from zoo import families

from dayzero.onboard.candidates.evidence import site_of
from dayzero.onboard.candidates.stops import Stop, few, made_of
from dayzero.onboard.lift.reason import reason
from dayzero.onboard.oracle import reference
from dayzero.onboard.oracle.calls import record_calls
from dayzero.onboard.prove.block import prove


class Bent(nn.Module):
    """A projection bent by a hyperbolic tangent."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        return torch.tanh(self.linear(x))


class BentNorm(nn.Module):
    def __init__(self, norm):
        super().__init__()
        self.weight, self.eps = norm.weight, norm.variance_epsilon

    def forward(self, x):
        return self.weight * torch.tanh(0.9 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps))


class Nowhere(nn.Module):
    """Like no block: a running product of two projections."""

    def __init__(self, hidden):
        super().__init__()
        self.one, self.two = nn.Linear(hidden, hidden, bias=False), nn.Linear(hidden, hidden, bias=False)

    def forward(self, hidden_states, **kwargs):
        return self.one(torch.atan(self.two(hidden_states).cumsum(1))), None


def site_at(path, change=lambda layer: None):
    """The site of a module of mixtral's first layer, after `change` of that layer."""
    model, _ = reference.build(families.config("mixtral"))
    change(model.model.layers[0])
    reference.redraw(model.double(), torch.Generator().manual_seed(0))
    ids = torch.randint(3, 190, (2, families.SEQUENCE), generator=torch.Generator().manual_seed(0))
    calls, _ = record_calls(model, ids)
    held.append(model)
    return site_of(calls, f"model.layers.0.{path}", model.config)


held = []


def said(site, role):
    verdict = prove(role, site, torch.Generator().manual_seed(0))
    assert not verdict.survivors
    return reason(site, (role,), verdict.attempts)


def test_an_attention_with_other_values_is_like_ours_but_for_them():
    def bend(layer):
        layer.self_attn.v_proj = Bent(layer.self_attn.v_proj)

    assert said(site_at("self_attn", bend), "mixer") == (
        "like GroupedQueryAttention, but for values (of v_proj.linear); runs tanh"
    )


def test_what_two_pieces_are_made_of_together_is_said_once():
    stop = Stop("A", {"queries": ("q.weight", "mix"), "keys": ("mix", "k.weight"), "values": (), "scores": ("s",)})
    assert stop.text == "like A, but for queries and keys (of q, mix, k); values; scores (of s)"


def test_a_mixture_with_an_odd_router_is_ours_but_for_that():
    def bend(layer):
        gate = layer.mlp.gate
        plain = gate.forward
        gate.forward = lambda x: (lambda logits, weights, index: (logits, torch.atan(weights), index))(*plain(x))

    line = said(site_at("mlp", bend), "ffn")
    assert line == "like MixtureOfExperts, but for its router (of gate); runs topk, atan"


def test_the_nearest_candidate_is_named_with_its_miss_and_the_operations_that_differ():
    def bend(layer):
        layer.input_layernorm = BentNorm(layer.input_layernorm)

    line = said(site_at("input_layernorm", bend), "norm")
    assert re.match(r"nearest block \w*RMSNorm: output misses by [2-9]\.\de-01 on the captured input; ", line)
    assert line.endswith("; the reference also has step tanh, constant 0.9")


def test_a_module_like_no_block_is_said_by_its_parameters_and_operations():
    def swap(layer):
        layer.self_attn = Nowhere(80)

    line = said(site_at("self_attn", swap), "mixer")
    assert line == "no block has parameters as one, two; runs cumsum, atan"


def test_what_a_value_is_made_of_is_measured():
    module = Nowhere(4).double()
    module.register_buffer("idle", torch.ones(2))
    x = torch.randn(1, 3, 4, dtype=torch.float64)
    with torch.no_grad():
        found = made_of(module, lambda: {"inner": module.two(x), "all": module(x)[0]})
    assert found == {"inner": {"two.weight"}, "all": {"one.weight", "two.weight"}}


def test_names_are_cut_where_they_are_many():
    assert few(["a.weight", "a.bias", "b.weight"]) == "a, b"
    assert few([f"p{i}" for i in range(9)]) == "p0, p1, p2, p3, p4, p5 and 3 more"
