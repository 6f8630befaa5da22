from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dayzero.onboard.candidates.factor import explain_factor, explain_in_all


def config(**fields):
    held = SimpleNamespace(**fields)
    held.to_dict = lambda: dict(fields)
    return held


@pytest.mark.parametrize(
    ("factor", "label", "elsewhere"),
    [
        (0.22, "config residual", 0.5),
        (1 / 6.0, "1 / config scaling", 1 / 8.0),
        (48**0.5, "sqrt(config hidden)", 80**0.5),
        (48**-0.5, "1 / sqrt(config hidden)", 80**-0.5),
        (0.78, "1 - config residual", 0.5),
        (float(torch.tensor(48**0.5, dtype=torch.bfloat16)), "bfloat16 sqrt(config hidden)", 8.9375),
    ],
)
def test_a_factor_follows_the_config_in_the_form_that_gave_it(factor, label, elsewhere):
    found = explain_factor(factor, nn.Module(), config(residual=0.22, scaling=6, hidden=48))
    assert found.label == label
    other = config(residual=0.5, scaling=8, hidden=80)
    assert found.resolve(nn.Module(), other) == pytest.approx(elsewhere, rel=1e-12)


def test_an_attribute_of_the_module_comes_before_the_config():
    layer = nn.Module()
    layer.multiplier = 0.22
    found = explain_factor(0.22, layer, config(residual=0.22))
    assert found.label == "attribute multiplier"
    layer.multiplier = 0.7
    assert found.resolve(layer, config(residual=0.22)) == 0.7


def test_what_nothing_holds_stays_a_literal_and_says_so():
    found = explain_factor(0.123, nn.Module(), config(residual=0.22))
    assert found.resolve(nn.Module(), config(residual=0.5)) == 0.123
    assert "no field of the config gives it" in found.label


def test_one_needs_no_explanation():
    assert explain_factor(1.0, nn.Module(), config(experts_per_token=1)).label.startswith("1.0")


def layers(*numbers):
    """Modules with a number each."""
    made = [nn.Module() for _ in numbers]
    for module, number in zip(made, numbers, strict=True):
        module.depth = number
    return made


def test_one_explanation_for_all_layers_is_no_accident_of_one():
    """At the first layer both halves of a sum are 2 ** -0.5; the second says which is which."""
    modules = layers(2, 4, 6)
    residual = [(1 - 1 / n) ** 0.5 for n in (2, 4, 6)]
    branch = [n**-0.5 for n in (2, 4, 6)]
    held = config(heads=4, groups=2)
    assert explain_in_all(residual, modules, held).label == "sqrt(1 - 1 / attribute depth)"
    assert explain_in_all(branch, modules, held).label == "1 / sqrt(attribute depth)"
    (deeper,) = layers(10)
    assert explain_in_all(residual, modules, held).resolve(deeper, held) == pytest.approx(0.9**0.5)


def test_layers_whose_factors_have_nothing_in_common_have_no_explanation():
    assert explain_in_all([0.5, 0.3], layers(2, 4), config(heads=4)) is None
    assert explain_in_all([1.0, 1.0], layers(2, 4), config(heads=4)).label.startswith("1.0")
