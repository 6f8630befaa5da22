import pytest
import torch
from drawn import drawn

from dayzero.runtime.nn import HyperConnected, HyperConnection, RMSNorm, StreamMean, StreamMerge

GENERATOR = torch.Generator().manual_seed(0)


def streams(tokens=5, count=3, hidden=8):
    return torch.randn(tokens, count, hidden, generator=GENERATOR, dtype=torch.float64)


def test_the_mixture_is_doubly_stochastic():
    connection = drawn(HyperConnection(8, 3, norm_eps=1e-6, eps=1e-6, iterations=60))
    with torch.no_grad():
        connection.weight *= 0.1  # Sinkhorn's iteration is slow where logits are far apart
    read, post, mix = connection(streams())
    assert (read.shape, post.shape, mix.shape) == ((5, 8), (5, 3), (5, 3, 3))
    assert torch.allclose(mix.sum(-1), torch.ones(5, 3).double(), atol=1e-4)
    assert torch.allclose(mix.sum(-2), torch.ones(5, 3).double(), atol=1e-4)
    assert (mix > 0).all()
    assert ((post > 0) & (post < 2)).all()


@pytest.mark.parametrize("iterations", [None, 1, 4])
def test_the_update_stream_by_stream(iterations):
    connection = drawn(HyperConnection(8, 3, norm_eps=1e-5, eps=1e-4, post_eps=0.01, iterations=iterations))
    norm, block = drawn(RMSNorm(8, 1e-6)), torch.nn.Linear(8, 8).double()
    x = streams()
    got = HyperConnected(connection, norm, block)(x, None)
    read, post, *mix = connection(x)
    y = block(norm(read))
    for token in range(5):
        for stream in range(3):
            kept = sum(mix[0][token, j, stream] * x[token, j] for j in range(3)) if mix else x[token, stream]
            assert torch.allclose(got[token, stream], post[token, stream] * y[token] + kept, rtol=1e-12)


def test_merging():
    x, merge = streams(), drawn(StreamMerge(8, 3, norm_eps=1e-6, eps=0.125))
    flat = x.flatten(1) / (x.flatten(1).square().mean(-1, keepdim=True) + 1e-6).sqrt()
    weights = torch.sigmoid(flat @ merge.weight.T * merge.scale + merge.bias) + 0.125
    assert torch.allclose(merge(x), torch.einsum("tn,tnh->th", weights, x), rtol=1e-12)
    assert torch.equal(StreamMean()(x), x.mean(1))
