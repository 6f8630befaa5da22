from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dayzero.onboard.candidates.position_scale import propose_position_scale

POSITION = torch.arange(24).repeat(2)


def config(**fields):
    held = SimpleNamespace(**fields)
    held.to_dict = lambda: dict(fields)
    return held


@pytest.mark.parametrize(("factor", "length"), [(0.1, 2048.0), (0.43, 7.0), (1.5, 100.0)])
def test_the_two_constants_are_solved(factor, length):
    factors = (1.0 + (POSITION.double() + 1.0) / length) ** factor
    found = propose_position_scale(factors, POSITION, nn.Module(), config())
    assert found is not None
    spec = found.spec(nn.Module(), config())
    assert spec.arguments == {"kind": "power", "factor": pytest.approx(factor), "length": pytest.approx(length)}
    assert torch.allclose(spec.build()(POSITION, torch.float64), factors, rtol=1e-12)


def test_a_constant_that_the_config_holds_follows_it():
    factors = (1.0 + (POSITION.double() + 1.0) / 512.0) ** 0.25
    found = propose_position_scale(factors, POSITION, nn.Module(), config(trained_length=512))
    changed = found.spec(nn.Module(), config(trained_length=640))
    assert changed.arguments["length"] == 640.0


@pytest.mark.parametrize(
    "factors",
    [
        torch.ones(48, dtype=torch.float64),
        1.0 + POSITION.double(),
        torch.where(POSITION == 11, 3.0, (1.0 + (POSITION.double() + 1.0) / 64.0) ** 0.5),
    ],
    ids=["constant", "linear", "one that differs"],
)
def test_other_factors_have_no_formula(factors):
    assert propose_position_scale(factors, POSITION, nn.Module(), config()) is None
