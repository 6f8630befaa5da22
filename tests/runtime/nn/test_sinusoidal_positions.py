"""Positions added to embeddings: against transformers' module, padding and packed documents included."""

import math

import pytest
import torch
from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding

from dayzero.runtime.nn import SinusoidalPositions


@pytest.mark.parametrize("padding", [0, 1])
def test_it_is_transformers_own(padding):
    ids = torch.tensor([[5, 9, padding, 7, 8, padding], [padding, padding, 3, 4, 2, 6]])
    theirs = M2M100SinusoidalPositionalEmbedding(16, 12, padding)(ids, ids)
    ours = SinusoidalPositions(12, first=padding + 1, padding=padding)(ids.flatten(), (6, 6), torch.float32)
    torch.testing.assert_close(ours.view(2, 6, 12), theirs, rtol=2e-6, atol=2e-6)


def test_every_document_starts_anew():
    positions = SinusoidalPositions(8, first=2)
    made = positions(torch.tensor([3, 3, 3, 3, 3]), (2, 0, 3), torch.float64)
    assert torch.equal(made[:2], made[2:4])
    wanted = [math.sin(4 * 10000 ** (-i / 3)) for i in range(4)]
    assert made[4, :4].tolist() == pytest.approx(wanted, rel=1e-12)
    assert made.dtype == torch.float64


def test_bfloat16_is_rounded_once():
    ids = torch.full((300,), 3)
    positions = SinusoidalPositions(8)
    wide = positions(ids, (300,), torch.float32)
    assert torch.equal(positions(ids, (300,), torch.bfloat16), wide.bfloat16())


def test_an_odd_width_is_refused():
    with pytest.raises(ValueError, match="width 7 is not even"):
        SinusoidalPositions(7)
