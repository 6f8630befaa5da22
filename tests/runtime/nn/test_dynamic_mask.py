"""Attention to the keys whose values give the largest numbers, against its formula, key by key."""

import pytest
import torch
from drawn import context_for, drawn
from torch.nn.functional import softplus

from dayzero.runtime.nn import DynamicMaskAttention, GroupedQueryAttention, attend

H, HEADS, GROUPS = 10, 4, 2


def block(keep, seed=0, bias=True, **more):
    attention = GroupedQueryAttention(H, HEADS, GROUPS, 4, 0.5, rotary=None, **more)
    return drawn(DynamicMaskAttention(attention, keep, bias), seed)


def inputs(rows):
    return torch.randn(rows, H, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


def written_out(made, x, window=None):
    """Every query by itself: the keys it sees, the `keep` largest numbers among these, their softmax."""
    inner = made.attention
    query, key, value = (part(x).unflatten(-1, (-1, 4)) for part in (inner.query, inner.key, inner.value))
    numbers = torch.exp(made.rate * softplus(made.step(value.flatten(1))))
    rows = []
    for at in range(len(x)):
        heads = []
        for head in range(HEADS):
            group = head // (HEADS // GROUPS)
            seen = range(0 if window is None else max(0, at + 1 - window), at + 1)
            kept = sorted(seen, key=lambda s: -numbers[s, group].item())[: made.keep]
            scores = key[kept, group] @ query[at, head] * 0.5 + numbers[kept, group]
            heads.append(scores.softmax(-1) @ value[kept, group])
        rows.append(torch.cat(heads))
    return inner.output(torch.stack(rows))


@pytest.mark.parametrize(("keep", "window"), [(2, None), (3, None), (50, None), (3, 5), (5, 3)])
@pytest.mark.parametrize("queries", [1024, 4])
def test_the_formula_and_its_gradients(keep, window, queries, monkeypatch):
    """queries: whose scores exist at a time; the others are computed again for the backward pass."""
    monkeypatch.setattr(attend, "QUERIES", queries)
    made, x = block(keep, window=window), inputs(11).requires_grad_()
    got, want = made(x, context_for(11)), written_out(made, x, window)
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)
    held = [x, *made.parameters()]
    weigh = inputs(11)
    ours, theirs = (torch.autograd.grad((out * weigh).sum(), held) for out in (got, want))
    torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-11)
    assert all(bool(grad.any()) for grad in ours)


@pytest.mark.parametrize("more", [{}, {"window": 4}, {"chunk": 5}])
def test_documents_do_not_see_one_another(more):
    made, x = block(3, **more), inputs(13)
    packed = made(x, context_for(8, 1, 4))
    alone = torch.cat([made(part, context_for(len(part))) for part in x.split([8, 1, 4])])
    torch.testing.assert_close(packed, alone, rtol=1e-12, atol=1e-12)


def test_a_new_one_weighs_all_keys_alike():
    made = DynamicMaskAttention(GroupedQueryAttention(H, HEADS, GROUPS, 4, 0.5), 3)
    made.reset_parameters(0.02)
    assert made.numbers(torch.randn(6, GROUPS, 4)).tolist() == torch.ones(6, GROUPS).tolist()
    assert made.step.bias is None


def test_numbers_are_computed_in_float32_at_least():
    made = block(3).bfloat16()
    assert made.numbers(torch.randn(6, GROUPS, 4, dtype=torch.bfloat16)).dtype == torch.float32
    assert made(inputs(6).bfloat16(), context_for(6)).dtype == torch.bfloat16


def test_keeping_nothing_is_refused():
    with pytest.raises(ValueError, match="attention to 0 keys sees nothing"):
        DynamicMaskAttention(GroupedQueryAttention(H, HEADS, GROUPS, 4, 0.5), 0)
