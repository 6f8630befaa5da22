import pytest
import torch
import torch.nn.functional as F
from recurrences import check_packed, context, drawn

from dayzero.runtime.nn import RecurrentBlock
from dayzero.runtime.nn.rg_lru import MAX_SLOPE, _BoundedRoot

SIZES = {"hidden": 10, "width": 12, "heads": 3, "conv_width": 4, "act": "gelu_tanh"}


def test_packed_documents_are_documents_alone():
    check_packed(drawn(RecurrentBlock(**SIZES)), 10)


def test_the_block_is_its_equations():
    block = drawn(RecurrentBlock(**SIZES))
    x = torch.randn(6, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    v = block.conv(block.u(x), (6,))
    state, rows = torch.zeros(12, dtype=torch.float64), []
    for t in range(6):
        gates = []
        for matrix, bias in ((block.recurrence_gate, block.recurrence_bias), (block.input_gate, block.input_bias)):
            each = [v[t, 4 * n : 4 * n + 4] @ matrix[n] + bias[n] for n in range(3)]
            gates.append(torch.sigmoid(torch.cat(each)))
        a = torch.exp(-8.0 * gates[0] * F.softplus(block.A))
        state = gates[1] * v[t] if t == 0 else a * state + torch.sqrt(1 - a**2) * gates[1] * v[t]
        rows.append(state)
    want = block.output(torch.stack(rows) * F.gelu(block.gate(x), approximate="tanh"))
    assert torch.allclose(block(x, context((6,))), want, rtol=1e-12, atol=1e-13)


def test_the_slope_of_the_root_is_bounded():
    x = torch.tensor([0.0, 1e-12, 0.25], dtype=torch.float64, requires_grad=True)
    _BoundedRoot.apply(x).sum().backward()
    assert x.grad.tolist() == pytest.approx([MAX_SLOPE, MAX_SLOPE, 1.0])


def test_float32_stays_finite_at_saturation():
    block = drawn(RecurrentBlock(**SIZES), gain=3.0, dtype=torch.float32)
    x = (300 * torch.randn(40, 10, generator=torch.Generator().manual_seed(1))).requires_grad_(True)
    block(x, context((40,))).square().mean().backward()
    assert all(bool(p.grad.isfinite().all()) for p in (x, *block.parameters()))


def test_initial_values_keep_nine_tenths_or_more():
    block = RecurrentBlock(**SIZES)
    block.reset_parameters(0.02)
    kept = torch.exp(-F.softplus(block.A))
    assert 0.9 <= float(kept.min().detach()) <= float(kept.max().detach()) <= 0.999
