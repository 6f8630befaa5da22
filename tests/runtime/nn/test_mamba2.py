"""Mamba-2 and the linear attention beneath it, against their recurrences."""

import pytest
import torch
import torch.nn.functional as F
from recurrences import LENGTHS, check_packed, context, drawn, values_and_gradients, worst

from dayzero.runtime.nn import Mamba2
from dayzero.runtime.nn.linear_attention import decayed_linear_attention

SIZES = {"hidden": 10, "heads": 4, "head_dim": 3, "state": 5, "conv_width": 4}
KINDS = {
    "gate first": {"norm_eps": 1e-5, "norm_groups": 2, "groups": 2},
    "norm first": {"norm": "norm_first", "norm_eps": 1e-5, "groups": 4, "bias": True, "output_bias": True},
    "no norm": {
        "norm": "none", "time_step_min": 0.5, "time_step_max": 1.5, "conv_bias": False,
        "input_multiplier": 0.5, "multipliers": [0.5, 2.0, 1.5, 0.7, 1.1],
    },
}  # fmt: skip


def step_by_step(query, key, value, decay, lengths=LENGTHS):
    outputs = []
    for q, k, v, g in zip(*(x.split(lengths) for x in (query, key, value, decay)), strict=True):
        state = q.new_zeros(q.shape[1], q.shape[2], v.shape[2])
        for t in range(len(q)):
            state = g[t].exp()[:, :, None] * state + torch.einsum("nk,nv->nkv", k[t], v[t])
            outputs.append(torch.einsum("nkv,nk->nv", state, q[t])[None])
    return torch.cat(outputs)


@pytest.mark.parametrize("channel", [False, True])
@pytest.mark.parametrize("strength", [1e-3, 1.0, 1e3])
def test_chunks_give_the_recurrence_and_its_gradients(channel, strength):
    draw = torch.Generator().manual_seed(0)
    shapes = {"query": 6, "key": 6, "value": 5, "decay": 6 if channel else 1}
    given = {n: torch.randn(sum(LENGTHS), 3, d, generator=draw, dtype=torch.float64) for n, d in shapes.items()}
    given["decay"] = -strength * given["decay"].abs()
    want = values_and_gradients(step_by_step, given)
    got = values_and_gradients(lambda **x: decayed_linear_attention(**x, lengths=LENGTHS, chunk=16), given)
    assert worst(got, want) < 1e-12
    single = {name: x.float() for name, x in given.items()}
    got = values_and_gradients(lambda **x: decayed_linear_attention(**x, lengths=LENGTHS), single)
    assert worst(got, want) < 3e-5


@pytest.mark.parametrize("kind", KINDS)
def test_packed_documents_are_documents_alone(kind):
    check_packed(drawn(Mamba2(**SIZES, **KINDS[kind])), 10)


def test_the_block_is_its_equations():
    block = drawn(Mamba2(**SIZES, norm="none", groups=2, time_step_min=0.9))
    x = torch.randn(7, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ctx = context((7,))
    u = block.u_conv(block.u(x), (7,)).unflatten(-1, (4, 3))
    B, C = (conv(p(x), (7,)).unflatten(-1, (2, 5)) for conv, p in ((block.B_conv, block.B), (block.C_conv, block.C)))
    dt = F.softplus(block.dt(x) + block.dt_bias).clamp(min=0.9)
    state, rows = torch.zeros(4, 3, 5, dtype=torch.float64), []
    for t in range(7):
        for head in range(4):
            kept = torch.exp(-block.A_log[head].exp() * dt[t, head])
            new = dt[t, head] * torch.outer(u[t, head], B[t, head // 2])
            state = state.clone()
            state[head] = kept * state[head] + new
        read = torch.stack([state[head] @ C[t, head // 2] + block.D[head] * u[t, head] for head in range(4)])
        rows.append(read.flatten() * F.silu(block.gate(x[t])))
    assert torch.allclose(block(x, ctx), block.output(torch.stack(rows)), rtol=1e-12, atol=1e-13)


def test_float32_stays_finite_at_saturation():
    block = drawn(Mamba2(**SIZES, **KINDS["gate first"]), gain=3.0, dtype=torch.float32)
    x = (30 * torch.randn(40, 10, generator=torch.Generator().manual_seed(1))).requires_grad_(True)
    block(x, context((40,))).square().mean().backward()
    assert all(bool(p.grad.isfinite().all()) for p in (x, *block.parameters()))


def test_sizes_must_fit():
    with pytest.raises(ValueError, match="4 heads of 3 do not fall into 3 groups"):
        Mamba2(**SIZES, groups=3)
