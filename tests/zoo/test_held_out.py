"""Proofs generalise: on weights, inputs and configs that took no part in any search, every proven block still agrees.

Five seeds; inputs a tenth to eight times as large; routers far into saturation; selection biases that outweigh every
score, so that what is selected scores low. Then config fields, one at a time: a fresh reference of the changed config,
and the block that the same evidence, or the same search, gives for it.
"""

import pytest
from zoo import families
from zoo.held_out import misses, misses_of_the_whole, misses_when, onboarded

SEEDS = (101, 202, 303, 404, 505)
FEW = ["mixtral", "deepseek_v3", "mamba2"]


@pytest.fixture(
    scope="module",
    params=[name if name in FEW else pytest.param(name, marks=pytest.mark.zoo) for name in families.FAMILIES],
)
def held(request):
    return onboarded(request.param)


@pytest.mark.slow
def test_every_proven_block_agrees_on_what_was_held_out(held):
    for seed in SEEDS:
        lines, blocks = misses(held, seed)
        assert blocks >= 1
        assert not lines, "\n".join(lines)


@pytest.mark.slow
def test_the_whole_model_agrees_on_what_was_held_out(held):
    lines = [line for seed in SEEDS for line in misses_of_the_whole(held, seed)]
    assert not lines, "\n".join(lines)


@pytest.mark.slow
def test_every_block_agrees_with_a_reference_of_a_changed_config(held):
    found = [(field, other, *misses_when(held, config, field, seed=606)) for field, other, config in held.varied()]
    assert [item for item in found if item[2] in {"follows", "other block"}]
    wrong = [f"{field} = {other!r}, {effect}: {line}" for field, other, effect, lines in found for line in lines]
    assert not wrong, "\n".join(wrong)
