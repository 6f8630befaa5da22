"""Every token of a document sees the whole source of that document, and no other."""

import math
from dataclasses import replace

import pytest
import torch
from drawn import context_for, drawn

from dayzero.runtime.nn import CrossAttention
from dayzero.runtime.nn.context import Source

H, WIDE = 10, 14


def block(bias=True):
    return drawn(CrossAttention(H, WIDE, 3, 4, 0.7, bias=bias, output_bias=bias))


def context(lengths, source=None):
    return replace(context_for(*lengths), source=source)


def inputs(rows, width, seed):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(made, x, states):
    """One document, head by head."""
    heads = []
    for head in range(3):
        rows = slice(4 * head, 4 * head + 4)
        q, k, v = (
            held @ part.weight[rows].t() + (part.bias[rows] if part.bias is not None else 0.0)
            for held, part in ((x, made.query), (states, made.key), (states, made.value))
        )
        heads.append((0.7 * q @ k.t()).softmax(-1) @ v)
    return made.output(torch.cat(heads, -1))


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(("lengths", "sources"), [((3, 5), (2, 6)), ((4, 4), (3, 3)), ((1, 0, 2), (5, 2, 1))])
def test_documents_look_at_their_own_source(lengths, sources, bias):
    made, x, states = block(bias), inputs(sum(lengths), H, 1), inputs(sum(sources), WIDE, 2)
    got = made(x, context(lengths, Source(states, sources)))
    parts = zip(x.split(lengths), states.split(sources), strict=True)
    want = torch.cat([by_hand(made, one, other) for one, other in parts])
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_a_document_without_a_source_gathers_nothing():
    made, x, states = block(bias=False), inputs(3, H, 1), inputs(2, WIDE, 2)
    got = made(x, context((1, 2), Source(states, (2, 0))))
    assert got[1:].tolist() == [[0.0] * H] * 2
    assert math.isfinite(float(got.detach().sum()))


def test_gradients_reach_the_source():
    made, x, states = block(), inputs(4, H, 1), inputs(5, WIDE, 2).requires_grad_(True)
    made(x, context((2, 2), Source(states, (2, 3))))[:2].sum().backward()
    assert bool(states.grad[:2].any())
    assert not bool(states.grad[2:].any())


def test_what_is_missing_is_said():
    made, x = block(), inputs(4, H, 1)
    with pytest.raises(ValueError, match="no encoder"):
        made(x, context((2, 2)))
    with pytest.raises(ValueError, match="2 documents have 1 sources"):
        made(x, context((2, 2), Source(inputs(3, WIDE, 2), (3,))))
