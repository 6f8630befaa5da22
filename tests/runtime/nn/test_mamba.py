"""Mamba and the recurrences beneath it, against their definitions."""

import pytest
import torch
import torch.nn.functional as F
from recurrences import LENGTHS, check_packed, context, drawn, values_and_gradients, worst

from dayzero.runtime.nn import Mamba
from dayzero.runtime.nn.linear_recurrence import linear_recurrence, selective_scan

SIZES = {"hidden": 10, "width": 12, "state": 5, "rank": 3, "conv_width": 4}
KINDS = {
    "plain": {"bias": True, "output_bias": True},
    "norms without weights": {"norm": "weightless", "norm_eps": 1e-5},
    "norms": {"norm": "weighted", "norm_eps": 1e-5, "conv_bias": False},
    "heads": {"heads": 3},
}


def decays_and_updates(strength=1.0):
    draw = torch.Generator().manual_seed(0)
    decay, update = (torch.randn(sum(LENGTHS), 6, generator=draw, dtype=torch.float64) for _ in range(2))
    return {"decay": torch.exp(-strength * decay.abs()), "update": update}


def step_by_step(decay, update):
    rows = []
    for a, b in zip(decay.split(LENGTHS), update.split(LENGTHS), strict=True):
        state = torch.zeros_like(b[:1])
        for t in range(len(b)):
            state = a[t : t + 1] * state + b[t : t + 1]
            rows.append(state)
    return torch.cat(rows)


@pytest.mark.parametrize("chunk", [1, 8, 64])
@pytest.mark.parametrize("strength", [1e-3, 1.0, 1e3])
def test_doubling_gives_the_recurrence_and_its_gradients(chunk, strength):
    given = decays_and_updates(strength)
    want = values_and_gradients(step_by_step, given)
    got = values_and_gradients(lambda **x: linear_recurrence(**x, lengths=LENGTHS, chunk=chunk), given)
    assert worst(got, want) < 1e-12


def scan_step_by_step(u, dt, rate, B, C):
    rows = []
    for v, d, b, c in zip(*(x.split(LENGTHS) for x in (u, dt, B, C)), strict=True):
        state = torch.zeros_like(rate)
        for t in range(len(v)):
            state = torch.exp(-rate * d[t, :, :, None]) * state + (d[t] * v[t])[..., None] * b[t, :, None]
            rows.append((state * c[t, :, None]).sum(-1)[None])
    return torch.cat(rows)


@pytest.mark.parametrize("strength", [1e-2, 1.0, 1e3])
def test_the_selective_scan_is_its_definition(strength):
    draw = torch.Generator().manual_seed(0)
    tokens = sum(LENGTHS)
    shapes = {"u": (tokens, 2, 3), "dt": (tokens, 2, 3), "rate": (2, 3, 4), "B": (tokens, 2, 4), "C": (tokens, 2, 4)}
    given = {name: torch.randn(shape, generator=draw, dtype=torch.float64) for name, shape in shapes.items()}
    given["dt"], given["rate"] = strength * given["dt"].abs(), given["rate"].abs()
    want = values_and_gradients(scan_step_by_step, given)
    got = values_and_gradients(lambda **x: selective_scan(**x, lengths=LENGTHS), given)
    assert worst(got, want) < 1e-11
    single = {name: x.float() for name, x in given.items()}
    assert worst(values_and_gradients(lambda **x: selective_scan(**x, lengths=LENGTHS), single), want) < 1e-4


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_documents_alone(kind):
    check_packed(drawn(Mamba(**SIZES, **KINDS[kind])), 10)


def test_the_block_is_its_equations():
    block = drawn(Mamba(**SIZES))
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    v = block.conv(block.u(x), (6,))
    dt = F.softplus(v @ block.dt_down[0].T @ block.dt_up[0].T + block.dt_bias)
    B, C = v @ block.B[0].T, v @ block.C[0].T
    state, rows = torch.zeros(12, 5, dtype=torch.float64), []
    for t in range(6):
        state = torch.exp(-block.A_log.exp() * dt[t, :, None]) * state + (dt[t] * v[t])[:, None] * B[t]
        rows.append((state @ C[t] + block.D * v[t]) * F.silu(block.gate(x[t])))
    assert torch.allclose(block(x, context((6,))), block.output(torch.stack(rows)), rtol=1e-12, atol=1e-13)


def test_float32_stays_finite_at_saturation():
    block = drawn(Mamba(**SIZES, **KINDS["plain"]), gain=3.0, dtype=torch.float32)
    x = (30 * torch.randn(40, 10, generator=torch.Generator().manual_seed(1))).requires_grad_(True)
    block(x, context((40,))).square().mean().backward()
    assert all(bool(p.grad.isfinite().all()) for p in (x, *block.parameters()))


def test_heads_must_divide_the_width():
    with pytest.raises(ValueError, match="12 channels do not fall into 5 heads"):
        Mamba(**SIZES, heads=5)
