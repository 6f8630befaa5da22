import pytest
import torch
from recurrences import LENGTHS, check_packed, context, drawn, values_and_gradients, worst

from dayzero.runtime.nn import ChannelMix, TimeMix
from dayzero.runtime.nn.rwkv import wkv


def by_definition(key, value, decay, bonus):
    rows = []
    for k, v in zip(key.split(LENGTHS), value.split(LENGTHS), strict=True):
        for t in range(len(k)):
            weights = [k[j] - (t - 1 - j) * decay.exp() for j in range(t)] + [k[t] + bonus]
            rows.append((torch.softmax(torch.stack(weights), 0) * v[: t + 1]).sum(0))
    return torch.stack(rows)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 8, 64])
@pytest.mark.parametrize("size", [0.1, 1.0, 100.0])
def test_chunks_give_the_weighted_mean_and_its_gradients(chunk, size):
    draw = torch.Generator().manual_seed(0)
    shapes = {"key": (sum(LENGTHS), 5), "value": (sum(LENGTHS), 5), "decay": (5,), "bonus": (5,)}
    given = {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
    given["key"] *= size
    want = values_and_gradients(by_definition, given)
    assert worst(values_and_gradients(lambda **x: wkv(**x, lengths=LENGTHS, chunk=chunk), given), want) < 1e-10
    single = {name: x.float() for name, x in given.items()}
    got = values_and_gradients(lambda **x: wkv(**x, lengths=LENGTHS, chunk=chunk), single)
    assert float((got["output"] - want["output"]).norm() / want["output"].norm()) < 1e-4
    assert all(bool(x.isfinite().all()) for x in got.values())


@pytest.mark.parametrize("half", [TimeMix, ChannelMix])
def test_packed_documents_are_documents_alone(half):
    check_packed(drawn(half(10, 14)), 10)


def test_the_halves_are_their_equations():
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    before = torch.cat([torch.zeros(1, 10, dtype=torch.float64), x[:-1]])
    half = drawn(ChannelMix(10, 14))
    xk, xr = (x * mix + before * (1 - mix) for mix in (half.key_mix, half.receptance_mix))
    want = torch.sigmoid(half.receptance(xr)) * half.value(torch.relu(half.key(xk)) ** 2)
    assert torch.allclose(half(x, context((6,))), want, rtol=1e-13)
    half = drawn(TimeMix(10, 14))
    xk, xv, xr = (x * mix + before * (1 - mix) for mix in (half.key_mix, half.value_mix, half.receptance_mix))
    mixed = wkv(half.key(xk), half.value(xv), half.decay, half.bonus, (6,))
    assert torch.allclose(half(x, context((6,))), half.output(torch.sigmoid(half.receptance(xr)) * mixed), rtol=1e-13)
