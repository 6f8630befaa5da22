import torch
from drawn import drawn

from dayzero.runtime.nn import GatedConnection, HyperConnected, RMSNorm

GENERATOR = torch.Generator().manual_seed(0)


def streams(tokens=5, count=3, hidden=8):
    return torch.randn(tokens, count, hidden, generator=GENERATOR, dtype=torch.float64)


def test_the_connection_stream_by_stream():
    block, x = drawn(GatedConnection(8, 3, rank=4, eps=1e-5, offset=1.0)), streams()
    z = torch.cat([s / (s.square().mean(-1, keepdim=True) + 1e-5).sqrt() for s in x.unbind(1)], -1)
    z = z * (1.0 + block.norm.weight)
    low = z @ block.down.weight.t() / 3
    gate = torch.sigmoid((low * torch.sigmoid(low)) @ block.up.weight.t())
    read, post = block(x)
    want = sum(g * s for g, s in zip(gate.chunk(3, -1), z.chunk(3, -1), strict=True)) / 3
    assert torch.allclose(read, want, rtol=1e-12)
    assert torch.allclose(post, 2.0 * torch.sigmoid(z @ block.inject.weight.t() / 3), rtol=1e-12)


def test_behind_the_last_layer_it_only_reads():
    block, x = drawn(GatedConnection(8, 3, rank=4, eps=1e-5, injects=False)), streams()
    assert block(x).shape == (5, 8)
    assert [name for name, _ in block.named_parameters()] == ["norm.weight", "down.weight", "up.weight"]


def test_every_stream_takes_its_share_of_the_block():
    connection, linear, x = drawn(GatedConnection(8, 3, rank=4, eps=1e-5)), torch.nn.Linear(8, 8).double(), streams()
    read, post = connection(x)
    got = HyperConnected(connection, None, linear)(x, None)
    assert torch.allclose(got, x + post[:, :, None] * linear(read)[:, None], rtol=1e-12)
    norm = drawn(RMSNorm(8, 1e-6))
    normed = HyperConnected(connection, norm, linear)(x, None)
    assert torch.allclose(normed, x + post[:, :, None] * linear(norm(read))[:, None], rtol=1e-12)


def test_each_token_by_itself():
    block, x = drawn(GatedConnection(8, 3, rank=4, eps=1e-5)), streams(7)
    for whole, first, rest in zip(block(x), block(x[:4]), block(x[4:]), strict=True):
        assert torch.allclose(whole, torch.cat([first, rest]), rtol=1e-12)
