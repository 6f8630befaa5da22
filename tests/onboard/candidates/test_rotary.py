"""The formula of every table is found, and only a right one."""

import pytest
import torch
from strange import Ledge
from torch import nn

from dayzero.onboard.candidates.rotary import propose_rotaries
from dayzero.onboard.oracle.calls import Call
from dayzero.runtime.nn.rotary import Rotary

POSITION = torch.arange(9)[None]


class Spin(nn.Module):
    """Tables by our own formula, spelled as references do; one for each kind of layer."""

    def __init__(self, pairs, **kinds):
        super().__init__()
        self.kinds = kinds
        self.register_buffer("rates", torch.ones(pairs), persistent=False)
        self.lengthen = next(iter(kinds.values())).attention_factor

    def forward(self, x, position, kind="all"):
        batch = position.shape[0]
        made = self.kinds[kind](position.flatten(), torch.float64)
        cos, sin = (torch.cat((t, t), -1).view(batch, -1, 2 * t.shape[-1]) for t in made)
        return cos, sin


def called(module, *kinds):
    x = torch.zeros(1, 9, 4, dtype=torch.float64)
    calls = []
    for kind in kinds or ("all",):
        args = (x, POSITION) if kind == "all" else (x, POSITION, kind)
        with torch.no_grad():
            calls.append(Call("spin", module, args, {}, module(*args)))
    calls[0].later.extend(calls[1:])
    return {"spin": calls[0]}


SETTINGS = {
    "default": ({}, {}),
    "linear": ({"factor": 4.0}, {"scaling": "linear", "factor": 4.0}),
    "dynamic": (
        {"factor": 4.0, "original_max_position_embeddings": 512},
        {"scaling": "dynamic", "factor": 4.0, "original_length": 512},
    ),
    "proportional": ({"partial_rotary_factor": 0.5}, {"scaling": "proportional", "rotated": 4}),
    "llama3": (
        {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512},
        {
            "scaling": "llama3",
            "factor": 8.0,
            "original_length": 512,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    ),
    "yarn": (
        {"factor": 8.0, "original_max_position_embeddings": 512, "beta_fast": 16.0},
        {"scaling": "yarn", "factor": 8.0, "original_length": 512, "beta_fast": 16.0, "attention_factor": 1.2},
    ),
    "yarn, not truncated": (
        {"factor": 8.0, "original_max_position_embeddings": 512, "truncate": False},
        {"scaling": "yarn", "factor": 8.0, "original_length": 512, "truncate": False},
    ),
    "longrope": (
        {
            "original_max_position_embeddings": 512,
            "short_factor": [1.0 + i / 4 for i in range(8)],
            "long_factor": [4.0 + i for i in range(8)],
        },
        {
            "scaling": "longrope",
            "original_length": 512,
            "short_factors": [1.0 + i / 4 for i in range(8)],
            "long_factors": [4.0 + i for i in range(8)],
        },
    ),
}


def formula(module, config):
    """The one formula for what the module makes."""
    (found,), unknown = propose_rotaries(called(module), config)
    assert unknown == []
    return found.candidate


@pytest.mark.parametrize("kind", SETTINGS)
def test_every_scaling_is_found_from_its_settings(kind):
    settings, arguments = SETTINGS[kind]
    config = Ledge(head_dim=16, max_position_embeddings=4096, rope_parameters={"rope_theta": 777.0, **settings})
    module = Spin(8, all=Rotary(16, 777.0, **arguments))
    candidate = formula(module, config)
    found = candidate.spec(module, config).arguments
    wanted = {"dim": 16, "theta": 777.0, "attention_factor": 1.0, **arguments}
    assert {name: found[name] for name in wanted} == wanted
    # Another base is followed, by the same evidence.
    config.rope_parameters["rope_theta"] = 999.0
    assert candidate.spec(module, config).arguments["theta"] == 999.0


def test_two_kinds_of_layers_have_two_formulas():
    config = Ledge(
        head_dim=16, rope_parameters={"local": {"rope_theta": 100.0}, "far": {"rope_theta": 5000.0, "factor": 2.0}}
    )
    module = Spin(8, local=Rotary(16, 100.0), far=Rotary(16, 5000.0, "linear", 2.0))
    calls = called(module, "local", "far", "local")
    found, unknown = propose_rotaries(calls, config)
    assert unknown == []
    assert [item.candidate.spec(module, config).arguments["theta"] for item in found] == [100.0, 5000.0]
    assert found[1].candidate.spec(module, config).arguments["scaling"] == "linear"
    assert [item.path for item in found] == ["spin", "spin"]
    assert [len(item.tables) for item in found] == [2, 1]
    assert found[1].tables[0].is_made_of(calls["spin"].later[0].output)


def test_an_odd_size_is_a_share_of_the_head():
    config = Ledge(head_dim=16, rope_parameters={"rope_theta": 100.0, "partial_rotary_factor": 0.334})
    module = Spin(3, all=Rotary(5, 100.0))
    candidate = formula(module, config)
    assert candidate.spec(module, config).arguments["dim"] == 5
    config.head_dim = 32
    assert candidate.spec(module, config).arguments["dim"] == 10


def test_a_base_may_stand_anywhere_in_the_config():
    config = Ledge(head_dim=16, attention=Ledge(turn=333.0))
    module = Spin(8, all=Rotary(16, 333.0))
    candidate = formula(module, config)
    assert candidate.arguments["theta"].label == "config attention.turn"


@pytest.mark.parametrize("offset", [0, 1009, 20011])
def test_a_table_that_is_wrong_far_away_has_no_formula(offset):
    class Bent(Spin):
        def forward(self, x, position):
            cos, sin = super().forward(x, position)
            return (cos, sin) if int(position.max()) < offset else (cos.flip(-1), sin.flip(-1))

    config = Ledge(head_dim=16, rope_parameters={"rope_theta": 100.0})
    module = Bent(8, all=Rotary(16, 100.0))
    calls = called(module)
    assert propose_rotaries(calls, config) == ([], ["spin"])


def test_a_table_that_nobody_makes_is_explained_where_it_is_handed():
    config = Ledge(head_dim=16, rope_parameters={"rope_theta": 100.0})
    hidden = torch.zeros(1, 9, 4, dtype=torch.float64)
    pair = Spin(8, all=Rotary(16, 100.0))(hidden, POSITION)
    (found,), unknown = propose_rotaries({"layer": Call("layer", nn.Identity(), (hidden, pair), {}, hidden)}, config)
    assert (found.path, unknown) == ("", [])
    assert found.candidate.spec(nn.Module(), config).arguments == {"dim": 16, "theta": 100.0}


class Stretched(Spin):
    """Tables whose frequencies are stretched by what is trained, along `curve`."""

    def __init__(self, curve):
        super().__init__(8, all=Rotary(16, 100.0))
        self.curve, self.bend = curve, nn.Parameter(torch.linspace(-0.2, 0.3, 8, dtype=torch.float64))

    def forward(self, x, position):
        rates = 100.0 ** (-torch.arange(0, 16, 2, dtype=torch.float64) / 16)
        angle = position[..., None] * rates * self.curve(self.bend)
        return torch.cat((angle, angle), -1).cos(), torch.cat((angle, angle), -1).sin()


def test_frequencies_that_are_trained_are_parameters_of_the_table():
    config = Ledge(head_dim=16, rope_parameters={"rope_theta": 100.0})
    module = Stretched(torch.exp)
    candidate = formula(module, config)
    assert candidate.spec(module, config).arguments == {
        "dim": 16, "theta": 100.0, "attention_factor": 1.0, "trained": True,
    }  # fmt: skip
    assert torch.equal(candidate.values(module.state_dict())["log_stretch"], module.bend)
    assert module.bend.tolist() == torch.linspace(-0.2, 0.3, 8, dtype=torch.float64).tolist()  # as it was


def test_frequencies_that_are_trained_otherwise_have_no_formula():
    config = Ledge(head_dim=16, rope_parameters={"rope_theta": 100.0})
    # The same values here, at this draw, and other gradients.
    fixed = torch.linspace(-0.2, 0.3, 8, dtype=torch.float64).exp()
    module = Stretched(lambda bend: fixed + (bend - bend.detach()))
    assert propose_rotaries(called(module), config) == ([], ["spin"])
