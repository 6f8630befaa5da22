"""Attention against its definition, written out token by token."""

import math

import pytest
import torch

from dayzero.runtime.nn import attend as module
from dayzero.runtime.nn.attend import Visibility, attend

LENGTHS = (5, 1, 0, 9)
N, G, D, DV = 4, 2, 6, 3


@pytest.fixture
def parts():
    generator = torch.Generator().manual_seed(0)
    sizes = ((N, D), (G, D), (G, DV))
    return [torch.randn(sum(LENGTHS), *size, generator=generator, dtype=torch.float64) for size in sizes]


def by_definition(query, key, value, lengths, scale, sees, softcap=None, sinks=None, bias=None):
    """sees(i, j): whether token i of a document attends to token j of it."""
    rows, start = [], 0
    for length in lengths:
        for i in range(length):
            heads = []
            for head in range(N):
                group = head // (N // G)
                weights = {}
                for j in range(length):
                    if sees(i, j):
                        score = float(query[start + i, head] @ key[start + j, group]) * scale
                        score = softcap * math.tanh(score / softcap) if softcap else score
                        weights[j] = math.exp(score + (bias(start + i, i - j, head) if bias else 0.0))
                total = sum(weights.values())
                if sinks is not None:
                    total += math.exp(float(sinks[head] if sinks.ndim == 1 else sinks[start + i, head]))
                heads.append(sum(w * value[start + j, group] for j, w in weights.items()) / total)
            rows.append(torch.stack(heads))
        start += length
    return torch.stack(rows)


def agrees(got, want):
    return bool(torch.linalg.vector_norm(got - want) <= 1e-12 * torch.linalg.vector_norm(want))


SEES = {
    "causal": (Visibility(), lambda i, j: j <= i),
    "window": (Visibility(window=3), lambda i, j: 0 <= i - j < 3),
    "chunk": (Visibility(chunk=4), lambda i, j: j <= i and i // 4 == j // 4),
    "both ways": (Visibility(causal=False), lambda i, j: True),
    "near both ways": (Visibility(causal=False, window=3), lambda i, j: abs(i - j) < 3),
}


@pytest.mark.parametrize("block", [1024, 2])
@pytest.mark.parametrize("kind", SEES)
def test_which_tokens_see_which(parts, kind, block, monkeypatch):
    monkeypatch.setattr(module, "QUERIES", block)
    visible, sees = SEES[kind]
    assert agrees(attend(*parts, LENGTHS, 0.7, visible), by_definition(*parts, LENGTHS, 0.7, sees))


def test_documents_of_one_length_together(parts):
    lengths = (5, 5, 5)
    for visible, sees in SEES.values():
        assert agrees(attend(*parts, lengths, 0.7, visible), by_definition(*parts, lengths, 0.7, sees))


@pytest.mark.parametrize("block", [1024, 2])
@pytest.mark.parametrize("kind", SEES)
def test_caps_sinks_and_biases(parts, kind, block, monkeypatch):
    monkeypatch.setattr(module, "QUERIES", block)
    visible, sees = SEES[kind]
    if kind == "chunk":
        pytest.skip("a bias by distance is not used with chunks")
    generator = torch.Generator().manual_seed(1)
    table = torch.randn(sum(LENGTHS), N, 20, generator=generator, dtype=torch.float64)
    sinks = torch.randn(N, generator=generator, dtype=torch.float64)

    def bias(first, age):
        rows = torch.arange(first, first + age.shape[0])
        return table[rows[:, None], :, age + 9].permute(2, 0, 1)

    for sink in (sinks, sinks * torch.linspace(0.5, 2, sum(LENGTHS), dtype=torch.float64)[:, None], None):
        want = by_definition(
            *parts, LENGTHS, 0.7, sees, 1.5, sink, lambda row, age, head: float(table[row, head, age + 9])
        )
        assert agrees(attend(*parts, LENGTHS, 0.7, visible, 1.5, sink, bias), want)


def test_blocks_have_the_gradients_of_the_whole(parts, monkeypatch):
    parts = [part.requires_grad_(True) for part in parts]
    sinks = torch.linspace(-1, 1, N, dtype=torch.float64, requires_grad=True)

    def gradients():
        out = attend(*parts, LENGTHS, 0.7, Visibility(window=4), sinks=sinks)
        return torch.autograd.grad(out.square().sum(), [*parts, sinks])

    whole = gradients()
    monkeypatch.setattr(module, "QUERIES", 2)
    assert all(agrees(got, want) for got, want in zip(gradients(), whole, strict=True))


def test_no_tokens():
    none = [torch.zeros(0, heads, 4) for heads in (4, 2, 2)]
    assert attend(*none, (), 1.0).shape == (0, 4, 4)
    assert attend(*none, (0, 0), 1.0, sinks=torch.zeros(4)).shape == (0, 4, 4)
