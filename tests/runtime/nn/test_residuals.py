import pytest
import torch
from drawn import drawn

from dayzero.runtime.nn import Affine, AffineSum, ConvolutionResidual, DecoderLayer, ResidualGate
from dayzero.runtime.nn.context import Context, lengths_of, positions_of

GENERATOR = torch.Generator().manual_seed(0)


def random(*shape):
    return torch.randn(*shape, generator=GENERATOR, dtype=torch.float64)


def context(*lengths):
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    held = lengths_of(bounds, int(bounds[-1]))
    return Context(bounds, held, positions_of(held, bounds.device))


def test_the_gate_keeps_the_size_of_independent_inputs():
    gate = drawn(ResidualGate(6, temperature=2.5, eps=1e-3))
    x, branch = random(4, 6), random(4, 6)
    b = torch.sigmoid(gate.gate / 2.5)
    assert torch.allclose(gate(x, branch), (1 - b**2).sqrt() * x + b * branch, rtol=1e-12)


def test_the_gate_never_closes_the_stream_quite():
    gate = ResidualGate(6, temperature=1.0, eps=0.01).double()
    torch.nn.init.constant_(gate.gate, 50.0)
    x, branch = random(4, 6), random(4, 6)
    assert torch.allclose(gate(x, branch), 0.1 * x + branch, rtol=1e-9)


def test_the_gate_reads_its_inputs_in_the_order_it_is_told():
    one, two = (ResidualGate(6, 1.0, 1e-3, branch_first=first) for first in (False, True))
    for gate in (one, two):
        torch.nn.init.constant_(gate.gate, 0.7)
    x, branch = random(4, 6), random(4, 6)
    assert torch.equal(one(x, branch), two(branch, x))
    assert not torch.equal(one(x, branch), two(x, branch))


def test_shift_comes_before_scale():
    block, x = drawn(Affine(6)), random(4, 6)
    assert torch.allclose(block(x), x * block.weight + block.bias * block.weight, rtol=1e-12)


def test_an_affine_sum():
    block, x, y = drawn(AffineSum(6)), random(4, 6), random(4, 6)
    assert torch.equal(block(x, y), block.first(x) + block.second(y))
    assert not torch.equal(block(x, y), block(y, x))


@pytest.mark.parametrize("divisor", [1.0, 5**0.5])
def test_the_convolution_by_its_sum(divisor):
    block, x = drawn(ConvolutionResidual(6, 4, divisor)), random(7, 6)
    padded = torch.cat([torch.zeros(3, 6).double(), x])
    want = torch.stack([x[t] + (padded[t : t + 4] * block.weight.t()).sum(0) for t in range(7)]) / divisor
    assert torch.allclose(block(x, context(7)), want, rtol=1e-12)


def test_the_convolution_sees_its_own_document_only():
    block, x = drawn(ConvolutionResidual(6, 4)), random(9, 6)
    together = block(x, context(2, 4, 3))
    apart = [block(piece, context(len(piece))) for piece in x.split([2, 4, 3])]
    assert torch.equal(together, torch.cat(apart))


class Halves(torch.nn.Module):
    def forward(self, x):
        return x[:, :3].repeat(1, 2), x[:, 3:].repeat(1, 2)


def test_a_part_with_two_outputs_and_one_with_two_inputs():
    layer = DecoderLayer(
        {"split": Halves(), "gate": AffineSum(6)}, {"split": "x", "gate": "split.1, x + split.0"}, "gate"
    )
    drawn(layer)
    x = random(4, 6)
    low, high = Halves()(x)
    assert torch.equal(layer(x, None), layer.gate(high, x + low))
