"""A gate that a layer spells out is a part of it; what makes the inputs of layers is found by its values."""

from types import SimpleNamespace

import pytest
import torch
from strange import Ledge
from torch import nn

from dayzero.onboard.candidates import site_of
from dayzero.onboard.candidates.evidence import Candidate, literal
from dayzero.onboard.oracle.calls import record_calls
from dayzero.onboard.prove.block import prove
from dayzero.onboard.structure.chains import chain_at, chain_to
from dayzero.onboard.structure.layer_inputs import find_layer_inputs, handed_to_layers
from dayzero.onboard.structure.layer_wiring import layer_parts
from dayzero.runtime.weights import Stored

H, P, V = 12, 5, 17
IDS = torch.randint(0, V, (2, 7), generator=torch.Generator().manual_seed(0))


class Calm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.hue = nn.Parameter(torch.rand(width) + 0.5)

    def forward(self, z):
        return z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + 1e-5) * self.hue


class Tier(nn.Module):
    """twist: what else of the stream enters between the two projections."""

    def __init__(self, twist):
        super().__init__()
        self.do, self.narrow, self.widen = nn.Linear(H, H), nn.Linear(H, P), nn.Linear(P, H)
        self.register_buffer("dim", torch.rand(1) + 0.5)
        self.twist = twist

    def forward(self, z, own):
        z = z + self.do(z).tanh() if self.twist == "outside" else z + self.do(z)
        between = nn.functional.silu(self.narrow(z)) * own
        if self.twist == "inside":
            between = between + z[..., :P]
        return (z + self.widen(between)) * self.dim


class Tower(nn.Module):
    def __init__(self, twist="", share=1.0):
        super().__init__()
        self.config, self.share, self.before = Ledge(spread=7.0), share, H**-0.5
        self.glyphs, self.marks = nn.Embedding(V, H), nn.Embedding(V, 3 * P)
        self.spread, self.calm = nn.Linear(H, 3 * P, bias=False), Calm(P)
        self.tiers = nn.ModuleList(Tier(twist) for _ in range(3))

    def forward(self, input_ids, use_cache=False):
        z = self.glyphs(input_ids)
        own = self.calm((self.spread(z) * self.before).unflatten(-1, (3, P)))
        own = (own + self.share * self.marks(input_ids).unflatten(-1, (3, P))) * 0.25
        for number, tier in enumerate(self.tiers):
            z = tier(z, own[:, :, number])
        return SimpleNamespace(logits=z)


def called(**how):
    torch.manual_seed(0)
    model = Tower(**how).double()
    return model, record_calls(model, IDS)[0]


def test_a_chain_is_a_part_with_the_stored_number_that_scales_the_sum_after_it():
    _, calls = called()
    parts = layer_parts(calls, "tiers.1")
    assert [(unit.name, unit.path, unit.role) for unit in parts.units] == [
        ("projection", "do", "projection"), ("gated_input", "widen", "chain"), ("residual_scale", "dim", "scale"),
    ]  # fmt: skip
    assert parts.units[1].reads == {"x": 1.0, "projection": 1.0}
    assert parts.units[2].reads == {"x": 1.0, "projection": 1.0, "gated_input": 1.0}
    assert parts.gives == {"residual_scale": 1.0}


def test_a_chain_is_proven_like_a_module():
    model, calls = called()
    chain = chain_to(calls, "tiers.1", "widen")
    assert (chain.first, chain.name) == ("narrow", "narrow-widen")
    assert chain_at(calls, "tiers.1.narrow-widen").name == chain.name
    assert chain_at(calls, "tiers.1.do-widen") is None
    torch.testing.assert_close(chain.replay(chain.hidden), calls["tiers.1.widen"].result, rtol=0, atol=0)
    site = site_of(calls, "tiers.1", model.config)
    site.call = chain
    assert "silu" in site.operations.steps
    assert not any(step.name == "tanh" for step in site.operations.sequence)
    verdict = prove("chain", site, torch.Generator().manual_seed(0))
    found = verdict.survivors[0].candidate
    assert found.block == "GatedLayerInput"
    assert found.spec(site.module, model.config).arguments == {
        "hidden": H, "width": P, "bias": True, "act": "silu",
    }  # fmt: skip


def test_what_ran_before_a_chain_is_none_of_its_operations():
    model, calls = called(twist="outside")
    site = site_of(calls, "tiers.1", model.config)
    site.call = chain_to(calls, "tiers.1", "widen")
    assert "tanh" not in site.operations.steps


def test_a_chain_that_more_of_the_stream_enters_is_none():
    _, calls = called(twist="inside")
    assert chain_to(calls, "tiers.1", "widen") is None


@pytest.mark.parametrize("share", [1.0, 3.0])
def test_what_makes_the_inputs_of_layers(share):
    model, calls = called(share=share)
    inputs = handed_to_layers(calls, "tiers")
    assert inputs.shape == (2, 7, 3, P)
    norm = Candidate("RMSNorm", {"width": literal(P, ""), "eps": literal(1e-5, "")}, {"weight": Stored("hue")})
    found = find_layer_inputs(calls, "tiers", IDS, model.config, lambda path: norm if path == "calm" else None)
    arguments = found.spec(model, model.config).arguments
    assert arguments.pop("norm").block == "RMSNorm"
    assert arguments == pytest.approx({
        "vocabulary": V, "hidden": H, "layers": 3, "width": P, "embed_scale": share, "projection_scale": H**-0.5,
        "scale": 0.25,
    })  # fmt: skip
    assert {str(name) for name in found.parameters} == {"embed.weight", "projection.weight", "norm.weight"}


def test_inputs_that_are_made_otherwise_are_not_found():
    model, calls = called()
    norm = Candidate("RMSNorm", {"width": literal(P, ""), "eps": literal(1e-3, "")}, {"weight": Stored("hue")})
    assert find_layer_inputs(calls, "tiers", IDS, model.config, lambda path: norm) is None
