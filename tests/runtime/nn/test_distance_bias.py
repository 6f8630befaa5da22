"""Biases by distance: their buckets against T5's own, made once and read by later layers."""

import pytest
import torch
from drawn import context_for, drawn
from transformers.models.t5.modeling_t5 import T5Attention

from dayzero.runtime.nn import DistanceBiasedAttention, GroupedQueryAttention
from dayzero.runtime.nn.distance_bias import BIAS, bucket_of

H, HEADS = 10, 3


def block(buckets=None, causal=True, both_ways=False, seed=0):
    attention = GroupedQueryAttention(H, HEADS, HEADS, 4, 1.0, rotary=None, causal=causal)
    return drawn(DistanceBiasedAttention(attention, buckets, 20, both_ways), seed)


def inputs(rows):
    return torch.randn(rows, H, generator=torch.Generator().manual_seed(rows), dtype=torch.float64)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("buckets", "farthest"), [(32, 128), (14, 20), (8, 1000)])
@pytest.mark.parametrize("both_ways", [True, False])
def test_buckets_are_those_of_t5(buckets, farthest, both_ways, dtype, monkeypatch):
    age = torch.arange(-700, 700)
    monkeypatch.setattr(torch.Tensor, "float", lambda tensor: tensor.to(dtype))
    theirs = T5Attention._relative_position_bucket(-age, both_ways, buckets, farthest)
    ours = bucket_of(age, buckets, farthest, both_ways, dtype)
    assert ours.tolist() == theirs.tolist()
    assert int(ours.min()) == 0
    assert int(ours.max()) == buckets - 1


@pytest.mark.parametrize(("causal", "both_ways"), [(True, False), (False, True)])
def test_scores_have_the_bias_of_their_distance(causal, both_ways):
    made, x = block(14, causal, both_ways), inputs(9)
    got = made(x, context_for(9))
    age = torch.arange(9)[:, None] - torch.arange(9)
    bias = made.table[bucket_of(age, 14, 20, both_ways, torch.float64)].permute(2, 0, 1)
    q, k, v = (
        part(x).unflatten(-1, (HEADS, -1)).transpose(0, 1)
        for part in (made.attention.query, made.attention.key, made.attention.value)
    )
    scores = q @ k.mT + bias
    weights = (scores.masked_fill(age < 0, float("-inf")) if causal else scores).softmax(-1)
    want = made.attention.output((weights @ v).transpose(0, 1).flatten(1))
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def test_later_layers_read_what_the_first_has_left_and_train_it():
    first, later, x = block(14), block(None, seed=1), inputs(11)
    shared = context_for(4, 7)
    first(x, shared)
    assert shared.shared[BIAS].shape == (13, HEADS)
    out = later(x, shared)
    parts = []
    for rows in (x[:4], x[4:]):
        alone = context_for(len(rows))
        first(rows, alone)
        parts.append(later(rows, alone))
    torch.testing.assert_close(out, torch.cat(parts), rtol=1e-12, atol=1e-12)
    out.sum().backward()
    assert bool(first.table.grad.any())
    assert "table" not in dict(later.named_parameters())


def test_without_a_first_layer_it_says_so():
    with pytest.raises(ValueError, match="none has left one"):
        block(None)(inputs(3), context_for(3))
