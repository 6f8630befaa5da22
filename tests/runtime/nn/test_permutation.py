"""Copies of tokens to their experts and back: sums by index against products with a matrix of zeros and weights."""

import pytest
import torch

from dayzero.runtime.nn import permutation
from dayzero.runtime.nn.permutation import collect, sorted_copies, spread, through_experts

TOKENS, EXPERTS, HIDDEN, TOP_K = 11, 5, 6, 2


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@pytest.fixture
def row():
    """Of 17 copies; tokens 3 and 10 have none."""
    row = torch.randint(0, TOKENS - 1, (17,), generator=torch.Generator().manual_seed(1))
    return row[row != 3]


@pytest.mark.parametrize("rows_in_a_block", [1, 4, 1000])
@pytest.mark.parametrize("weighted", [True, False])
def test_collect_is_a_product_with_a_matrix(row, weighted, rows_in_a_block, monkeypatch):
    monkeypatch.setattr(permutation, "_BLOCK", rows_in_a_block * HIDDEN)
    y, weights = draw(len(row), HIDDEN).requires_grad_(), draw(len(row), seed=2).requires_grad_()
    sent = draw(TOKENS, HIDDEN, seed=3)
    of = torch.zeros(TOKENS, len(row), dtype=torch.float64)
    of[row, torch.arange(len(row))] = 1.0
    wanted = of @ (y * weights.unsqueeze(-1) if weighted else y)
    found = collect(y, row, TOKENS, weights if weighted else None)
    torch.testing.assert_close(found, wanted, rtol=1e-13, atol=1e-14)
    assert not found[[3, 10]].any()
    leaves = (y, weights) if weighted else (y,)
    for mine, theirs in zip(*(torch.autograd.grad(out, leaves, sent) for out in (found, wanted)), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-13, atol=1e-14)


def test_the_gradient_of_spread_is_the_sum_of_copies(row):
    x, sent = draw(TOKENS, HIDDEN).requires_grad_(), draw(len(row), HIDDEN, seed=3)
    wanted = torch.autograd.grad(x[row], x, sent)[0]
    torch.testing.assert_close(torch.autograd.grad(spread(x, row), x, sent)[0], wanted, rtol=1e-13, atol=1e-14)


def test_weighted_sums_in_bfloat16_are_rounded_once(row):
    y, weights = draw(len(row), HIDDEN, dtype=torch.bfloat16), draw(len(row), seed=2, dtype=torch.bfloat16)
    exact = collect(y.double(), row, TOKENS, weights.double())
    assert torch.equal(collect(y, row, TOKENS, weights), exact.to(torch.bfloat16))


@pytest.mark.parametrize("weigh", ["output", "input"])
def test_through_experts_that_multiply(weigh):
    """Expert e is a cube times e + 1, so that a weight before it and one behind it differ."""
    x, weights = draw(TOKENS, HIDDEN), draw(TOKENS, TOP_K, seed=2).abs()
    index = torch.rand(TOKENS, EXPERTS, generator=torch.Generator().manual_seed(4)).topk(TOP_K).indices
    copies = sorted_copies(index, EXPERTS)

    def compute(rows, counts):
        return rows**3 * torch.arange(1.0, EXPERTS + 1, dtype=torch.float64).repeat_interleave(counts).unsqueeze(-1)

    factor = weights if weigh == "output" else weights**3
    wanted = x**3 * (factor * (index + 1)).sum(-1, keepdim=True)
    torch.testing.assert_close(through_experts(compute, x, weights, copies, weigh), wanted, rtol=1e-12, atol=1e-14)
