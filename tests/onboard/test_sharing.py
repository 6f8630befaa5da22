"""Layers that share a block and read the embeddings: how they are wired, what is shared, and under which names."""

from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from dayzero.onboard.candidates import Candidate
from dayzero.onboard.oracle.calls import Undiscovered, record_calls
from dayzero.onboard.prove.block import Attempt
from dayzero.onboard.prove.proven import NotProven, ProvenLayer, ProvenPart
from dayzero.onboard.sharing import SharedParts, first_name, shared_name, shared_parts
from dayzero.onboard.structure.kept_inputs import handed_on
from dayzero.onboard.structure.layer_wiring import layer_parts
from dayzero.onboard.structure.uses import list_around, members, use_of

HIDDEN = 6
IDS = torch.arange(10).reshape(2, 5)


class Mix(nn.Module):
    """Mixes tokens; reads twice the width that it gives."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(HIDDEN, 2 * HIDDEN, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x.cumsum(1) @ self.weight.T


class Scale(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:]) * self.weight


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide, self.mix = Scale(2 * HIDDEN), Mix()

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return self.mix(self.wide(torch.cat([x, first], -1)))


class Tier(nn.Module):
    def __init__(self, looks: bool):
        super().__init__()
        self.pair = Pair() if looks else None
        self.out = nn.Linear(HIDDEN, HIDDEN, bias=False, dtype=torch.float64)

    def forward(self, x: Tensor, first: Tensor) -> Tensor:
        return x + self.out(x if self.pair is None else self.pair(x, first))


class Toy(nn.Module):
    def __init__(self):
        super().__init__()
        self.config = SimpleNamespace(is_encoder_decoder=False)
        self.rows = nn.Embedding(11, HIDDEN, dtype=torch.float64)
        self.tiers = nn.ModuleList([Tier(False), Tier(True), Tier(False), Tier(True)])
        self.tiers[3].pair.wide.weight = self.tiers[1].pair.wide.weight
        self.tiers[3].pair.mix.weight = self.tiers[1].pair.mix.weight

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> "Given":
        x = first = self.rows(input_ids)
        for tier in self.tiers:
            x = tier(x, first)
        return Given(x)


@dataclass
class Given:
    logits: Tensor


@pytest.fixture
def toy():
    torch.manual_seed(0)
    return Toy()


def test_a_part_may_read_the_stream_and_the_embeddings_side_by_side(toy):
    calls, _ = record_calls(toy, IDS)
    found = layer_parts(calls, "tiers.3", {"pair"})
    wired = {unit.name: (unit.role, unit.inputs) for unit in found.units}
    assert wired == {
        "mixer_input": ("beside", [{"x": 1.0}, {"past.0": 1.0}]),
        "mixer_norm": ("norm", [{"mixer_input": 1.0}]),
        "mixer": ("mixer", [{"mixer_norm": 1.0}]),
        "projection": ("projection", [{"mixer": 1.0}]),
    }
    assert found.gives == {"x": 1.0, "projection": 1.0}
    assert handed_on(calls, "tiers") == [0]
    assert [unit.path for unit in layer_parts(calls, "tiers.2").units] == ["out"]


def test_what_is_beside_the_stream_must_be_known(toy):
    toy.tiers[3].pair.register_forward_pre_hook(lambda module, args: (args[0], args[1].square()))
    calls, _ = record_calls(toy, IDS)
    with pytest.raises(Undiscovered, match="nor several of them side by side"):
        layer_parts(calls, "tiers.3", {"pair"})


def proven(calls, index):
    units = layer_parts(calls, f"tiers.{index}", {"pair"} if index % 2 else ()).units
    attempt = Attempt(Candidate("Projection", {}, {}), 0.0, "")
    return ProvenLayer([ProvenPart(unit, attempt, {}, []) for unit in units], {})


def test_parts_are_shared_whose_parameters_are_the_same_objects(toy):
    calls, _ = record_calls(toy, IDS)
    layers = [proven(calls, index) for index in range(4)]
    assert shared_parts(toy, "tiers", layers, range(4)) == [SharedParts((1, 3), ("mixer_norm", "mixer"))]
    toy.tiers[3].pair.mix.weight = nn.Parameter(toy.tiers[3].pair.mix.weight.detach().clone())
    assert shared_parts(toy, "tiers", layers, range(4)) == [SharedParts((1, 3), ("mixer_norm",))]
    toy.tiers[2].out = toy.tiers[3].out
    with pytest.raises(NotProven, match="share parts with different sets of other layers"):
        shared_parts(toy, "tiers", layers, range(4))


def test_a_part_that_shares_some_of_its_parameters_is_refused(toy):
    calls, _ = record_calls(toy, IDS)
    layers = [proven(calls, index) for index in range(4)]
    toy.tiers[2].out.register_parameter("bias", toy.tiers[0].out.weight)
    with pytest.raises(NotProven, match=r"projection of tiers\.2 shares some of its parameters with projection"):
        shared_parts(toy, "tiers", layers, range(4))


def test_names_of_shared_parts():
    sets = [SharedParts((2, 5), ("ffn", "mixer")), SharedParts((3, 4), ("mixer",))]
    assert shared_name("layers.5.mixer.query.weight", sets) == "shared.0.mixer.query.weight"
    assert shared_name("layers.4.ffn.up.weight", sets) == "layers.4.ffn.up.weight"
    assert first_name("shared.1.mixer.query.weight", sets) == "layers.3.mixer.query.weight"
    assert first_name("norm.weight", sets) == "norm.weight"


def test_the_use_is_what_ran_among_the_members_that_own_parameters():
    held = nn.Module()
    held.sets = nn.ModuleList([nn.Identity(), nn.Linear(2, 2), nn.Identity(), nn.Linear(2, 2)])
    held.other = nn.Linear(2, 2)
    assert list_around(held, "sets.3") == "sets"
    assert list_around(held, "other") is None
    assert members(held, "sets") == [1, 3]
    assert use_of(held, ["other", "sets.3"]) == 1
    assert use_of(held, ["other"]) == 0
    assert use_of(held, ["sets.1", "sets.3"]) == 0  # all of them: these are no uses
