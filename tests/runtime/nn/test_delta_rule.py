"""The chunked delta rule against its definition, token by token."""

import pytest
import torch
from recurrences import LENGTHS, values_and_gradients, worst

from dayzero.runtime.nn.delta_rule import decayed_scores, gated_delta_rule


def step_by_step(query, key, value, decay, beta, lengths=LENGTHS):
    outputs = []
    for q, k, v, g, b in zip(*(x.split(lengths) for x in (query, key, value, decay, beta)), strict=True):
        state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
        for t in range(len(q)):
            state = g[t].exp()[:, :, None] * state
            error = v[t] - torch.einsum("nkv,nk->nv", state, k[t])
            state = state + torch.einsum("n,nk,nv->nkv", b[t], k[t], error)
            outputs.append(torch.einsum("nkv,nk->nv", state, q[t])[None])
    return torch.cat(outputs)


def inputs(rng, channel, strength=1.0, heads=3, key_dim=6, value_dim=5):
    tokens = sum(LENGTHS)
    key = torch.nn.functional.normalize(rng((tokens, heads, key_dim)), dim=-1)
    return {
        "query": rng((tokens, heads, key_dim)),
        "key": key,
        "value": rng((tokens, heads, value_dim)),
        "decay": -strength * rng((tokens, heads, key_dim if channel else 1)).abs(),
        "beta": 2 * torch.rand(tokens, heads, dtype=torch.float64, generator=torch.Generator().manual_seed(1)),
    }


@pytest.fixture
def rng():
    draw = torch.Generator().manual_seed(0)
    return lambda shape: torch.randn(shape, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("chunk", [1, 16, 64])
def test_chunks_give_the_recurrence_and_its_gradients(rng, channel, chunk):
    given = inputs(rng, channel)
    want = values_and_gradients(step_by_step, given)
    got = values_and_gradients(lambda **x: gated_delta_rule(**x, lengths=LENGTHS, chunk=chunk), given)
    assert worst(got, want) < 1e-12


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("strength", [0.0, 1e-3, 50.0, 1e4])
def test_no_decay_overflows_in_float32(rng, channel, strength):
    given = {name: x.float() for name, x in inputs(rng, channel, strength).items()}
    want = values_and_gradients(step_by_step, {name: x.double() for name, x in given.items()})
    got = values_and_gradients(lambda **x: gated_delta_rule(**x, lengths=LENGTHS), given)
    plain = values_and_gradients(step_by_step, given)
    assert worst(got, want) < 3 * worst(plain, want) + 1e-5


def test_strong_decay_beside_weak_ones_keeps_its_digits(rng):
    # One step of 1e4 among decays of 1e-4: differences of running sums would lose all that the weak ones say.
    given = inputs(rng, True, 1e-4)
    given["decay"][3::7] = -1e4
    want = values_and_gradients(step_by_step, given)
    got = values_and_gradients(
        lambda **x: gated_delta_rule(**x, lengths=LENGTHS), {n: x.float() for n, x in given.items()}
    )
    assert worst({"output": got["output"]}, {"output": want["output"]}) < 1e-5


@pytest.mark.parametrize("channel", [False, True])
def test_scores_are_their_definition(rng, channel):
    rows, keys, decay = rng((8, 4)), rng((8, 4)), -rng((8, 4 if channel else 1)).abs()
    want = torch.zeros(8, 8, dtype=torch.float64)
    for i in range(8):
        for j in range(i + 1):
            want[i, j] = (rows[i] * keys[j] * decay[j + 1 : i + 1].sum(0).exp()).sum()
    assert torch.allclose(decayed_scores(rows, keys, decay), want, atol=1e-14)
