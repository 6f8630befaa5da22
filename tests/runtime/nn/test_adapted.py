"""Low-rank additions to the projections of a block that several layers share."""

from dataclasses import replace

import pytest
import torch
from drawn import context_for, drawn

from dayzero.runtime.nn import Adapted, GatedFeedForward, GroupedQueryAttention

GENERATOR = torch.Generator().manual_seed(3)
X = torch.randn(7, 10, generator=GENERATOR, dtype=torch.float64)


def attention():
    return GroupedQueryAttention(10, 2, 1, 4, 0.5, rotary=None, out=6)


def test_each_use_is_the_block_with_other_weights():
    block = drawn(Adapted(attention(), [["query"], ["key"]], rank=3, uses=2))
    plain = drawn(attention())
    for use in (0, 1):
        state = dict(block.block.state_dict())
        for number, name in enumerate(("query", "key")):
            addition = block.uses[use][number]
            state[f"{name}.weight"] = state[f"{name}.weight"] + addition.up[name].weight @ addition.down.weight
        plain.load_state_dict(state)
        context = context_for(4, 3)
        got = block(X, replace(context, use=use))
        assert got.shape == (7, 6)
        torch.testing.assert_close(got, plain(X, context), rtol=1e-12, atol=1e-12)


def test_only_the_use_that_ran_has_a_gradient():
    block = drawn(Adapted(attention(), [["value"]], rank=3, uses=3))
    block(X, replace(context_for(7), use=2)).sum().backward()
    ran = {
        name.split(".")[1]
        for name, held in block.named_parameters()
        if name.startswith("uses.") and held.grad is not None
    }
    assert ran == {"2"}
    assert not block.block.value._forward_hooks


def test_projections_in_one_list_read_the_same_few_values():
    block = drawn(Adapted(GatedFeedForward(10, 12, "silu"), [["gate", "up"]], rank=2))
    addition, held = block.uses[0][0], block.block
    low = addition.down(X)
    gate, up = (getattr(held, name)(X) + addition.up[name](low) for name in ("gate", "up"))
    wanted = held.down(torch.nn.functional.silu(gate) * up)
    torch.testing.assert_close(block(X, context_for(7)), wanted, rtol=1e-12, atol=1e-12)


def test_targets_are_projections_of_one_input():
    with pytest.raises(ValueError, match="different widths"):
        Adapted(GatedFeedForward(10, 12, "silu"), [["gate", "down"]], rank=2)
    with pytest.raises(ValueError, match="not all projections"):
        Adapted(GroupedQueryAttention(10, 2, 1, 4, 0.5, qk_norm="head"), [["query_norm"]], rank=2)
