"""Blocks inside blocks: as data and back, checked, built, and rendered as nested constructor calls."""

import math

import pytest
from routed import routed

from dayzero.onboard.generate import call
from dayzero.runtime.block_spec import BlockSpec
from dayzero.runtime.nn import Experts, MixtureOfExperts, Router


def test_a_nested_block_survives_json_and_builds():
    spec = routed(8, 6, 2, 5, renormalise=True)
    again = BlockSpec.model_validate_json(spec.model_dump_json())
    assert again == spec
    built = again.build()
    assert isinstance(built, MixtureOfExperts)
    assert isinstance(built.router, Router)
    assert isinstance(built.experts, Experts)
    assert (built.router.top_k, built.experts.width, built.router.normalise.eps) == (2, 5, 0.0)


def test_all_blocks_inside_are_walked():
    names = [block.block for block in routed(8, 6, 2, 5, renormalise=True).walk()]
    assert names == ["MixtureOfExperts", "Router", "Normalise", "Experts"]


def test_the_call_is_nested_and_leaves_defaults_out():
    assert call(routed(8, 6, 2, 5, renormalise=True)) == (
        "MixtureOfExperts(router=Router(hidden=8, experts=6, top_k=2, normalise=Normalise()), "
        "experts=Experts(experts=6, hidden=8, width=5, act='silu'))"
    )


def test_an_infinite_number_is_rendered_as_python():
    gate = BlockSpec(block="ClampedGLU", arguments={"act": "silu", "limit": math.inf})
    assert call(gate) == "ClampedGLU(act='silu', limit=float(\"inf\"))"
    assert BlockSpec.model_validate_json(gate.model_dump_json()) == gate


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"router": {"block": "RMSNorm", "arguments": {"width": 4, "eps": 1e-6}}},
            "MixtureOfExperts.router is RMSNorm",
        ),
        ({"router": {"block": "Rooter", "arguments": {}}}, "no block 'Rooter'"),
        ({"router": "softmax"}, "Input should be an instance of Routing"),
    ],
)
def test_a_block_of_the_wrong_kind_is_refused(arguments, message):
    experts = BlockSpec(block="Experts", arguments={"experts": 2, "hidden": 4, "width": 3, "act": "silu"})
    with pytest.raises(ValueError, match=message):
        BlockSpec(block="MixtureOfExperts", arguments={"experts": experts, **arguments})
