"""Routed attention heads against one attention a choice, written out; packing is exact."""

from dataclasses import replace

import pytest
import torch
from drawn import context_for, drawn

from dayzero.runtime.nn import Experts, MixtureOfAttention, Rotary, Router
from dayzero.runtime.nn.rotary import rotate

HIDDEN, EXPERTS, KV, DIM = 10, 5, 2, 4


def packed(*lengths):
    """Documents, with rotary tables for heads of size DIM."""
    context = context_for(*lengths)
    with torch.no_grad():
        table = Rotary(DIM, 10000.0)(context.position, torch.float64)
    return replace(context, tables=(table,))


def block(**more):
    experts = Experts(EXPERTS, HIDDEN, KV * DIM, None, is_gated=False)
    router = Router(HIDDEN, EXPERTS, 2, scored="selected")
    return drawn(MixtureOfAttention(router, experts, KV, 0.37, **more))


def by_hand(made, x, context):
    """Token by token, choice by choice, head by head, for one document."""
    weights, index = made.router(x, context)
    heads = (-1, KV, DIM)
    key, value = (linear(x).view(heads) for linear in (made.key, made.value))
    key = key if made.rotary is None else rotate(key, *context.tables[0], made.rotary)
    rows = []
    for t in range(len(x)):
        total = torch.zeros(HIDDEN, dtype=x.dtype) if made.bias is None else made.bias.clone()
        for weight, e in zip(weights[t], index[t].tolist(), strict=True):
            query = (made.experts.up[e] @ x[t]).view(1, KV, DIM)
            if made.rotary is not None:
                query = rotate(query, *(table[t : t + 1] for table in context.tables[0]), made.rotary)
            gathered = []
            for head in range(KV):
                scores = 0.37 * key[: t + 1, head] @ query[0, head]
                gathered.append(scores.softmax(-1) @ value[: t + 1, head])
            total = total + weight * (made.experts.down[e] @ torch.cat(gathered))
        rows.append(total)
    return torch.stack(rows)


@pytest.mark.parametrize("more", [{"rotary": None}, {"bias": True}, {"rotary": "interleaved", "bias": True}])
def test_is_what_the_equation_says(more):
    made = block(**more)
    x = torch.randn(7, HIDDEN, dtype=torch.float64)
    context = packed(7)
    torch.testing.assert_close(made(x, context), by_hand(made, x, context))
    assert made.expert_counts.sum() == 14


def test_packed_documents_do_not_see_each_other():
    made = block(bias=True)
    x = torch.randn(9, HIDDEN, dtype=torch.float64)
    alone = torch.cat([made(part, packed(len(part))) for part in (x[:4], x[4:5], x[5:])])
    torch.testing.assert_close(made(x, packed(4, 1, 4)), alone)


def test_gradients_reach_every_parameter():
    made = block(bias=True)
    made(torch.randn(6, HIDDEN, dtype=torch.float64), packed(6)).square().sum().backward()
    assert all(parameter.grad is not None and bool(parameter.grad.any()) for parameter in made.parameters())


def test_sizes_that_do_not_fit_are_refused():
    router = Router(HIDDEN, EXPERTS, 2)
    with pytest.raises(ValueError, match="divide into 3 heads"):
        MixtureOfAttention(router, Experts(EXPERTS, HIDDEN, 8, None, is_gated=False), 3, 1.0)
    with pytest.raises(ValueError, match="give experts without act"):
        MixtureOfAttention(router, Experts(EXPERTS, HIDDEN, 8, "relu", is_gated=False), 2, 1.0)
    with pytest.raises(ValueError, match="router over as many classes"):
        MixtureOfAttention(Router(HIDDEN, 6, 2), Experts(EXPERTS, HIDDEN, 8, None, is_gated=False), 2, 1.0)
