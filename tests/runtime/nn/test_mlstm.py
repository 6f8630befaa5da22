import pytest
import torch
import torch.nn.functional as F
from recurrences import LENGTHS, check_packed, context, drawn, values_and_gradients, worst

from dayzero.runtime.nn import MLSTM
from dayzero.runtime.nn.mlstm import mlstm

SIZES = {"hidden": 10, "heads": 3, "key_dim": 4, "value_dim": 5, "eps": 1e-6, "norm_eps": 1e-5}


def step_by_step(query, key, value, write, keep, eps=1e-2):
    rows = []
    for q, k, v, i, f in zip(*(x.split(LENGTHS) for x in (query, key, value, write, keep)), strict=True):
        matrix, total = q.new_zeros(q.shape[1], q.shape[2], v.shape[2]), q.new_zeros(q.shape[1], q.shape[2])
        m = q.new_zeros(q.shape[1])
        for t in range(len(q)):
            log_keep = F.logsigmoid(f[t])
            new = torch.maximum(log_keep + m, i[t])
            kept, added = (log_keep + m - new).exp(), (i[t] - new).exp()
            m = new
            matrix = kept[:, None, None] * matrix + added[:, None, None] * k[t, :, :, None] * v[t, :, None]
            total = kept[:, None] * total + added[:, None] * k[t]
            below = torch.maximum((total * q[t]).sum(-1).abs(), (-m).exp()) + eps
            rows.append(((matrix * q[t, :, :, None]).sum(1) / below[:, None])[None])
    return torch.cat(rows)


@pytest.mark.slow
@pytest.mark.parametrize("chunk", [1, 8, 64])
@pytest.mark.parametrize("size", [0.3, 1.0, 8.0])
def test_chunks_give_the_recurrence_and_its_gradients(chunk, size):
    draw = torch.Generator().manual_seed(0)
    shapes = {"query": (3, 4), "key": (3, 4), "value": (3, 5), "write": (3,), "keep": (3,)}
    given = {n: torch.randn(sum(LENGTHS), *s, generator=draw, dtype=torch.float64) for n, s in shapes.items()}
    given["write"], given["keep"] = size * given["write"], size * given["keep"] + 2
    want = values_and_gradients(step_by_step, given)
    got = values_and_gradients(lambda **x: mlstm(**x, eps=1e-2, lengths=LENGTHS, chunk=chunk), given)
    assert worst(got, want) < 1e-11


@pytest.mark.parametrize("options", [{}, {"soft_cap": 2.0, "bias": True, "output_bias": True, "norm_bias": True}])
def test_packed_documents_are_documents_alone(options):
    check_packed(drawn(MLSTM(**SIZES, **options)), 10)


def test_float32_stays_finite_at_saturation():
    block = drawn(MLSTM(**SIZES, soft_cap=15.0), gain=3.0, dtype=torch.float32)
    x = (300 * torch.randn(90, 10, generator=torch.Generator().manual_seed(1))).requires_grad_(True)
    block(x, context((90,))).square().mean().backward()
    assert all(bool(p.grad.isfinite().all()) for p in (x, *block.parameters()))


def test_initial_values_write_little_and_keep_most():
    block = MLSTM(**SIZES)
    block.reset_parameters(0.02)
    assert float(block.input_gate.bias.exp().max().detach()) < 1e-4
    assert float(block.forget_gate.bias.sigmoid().min().detach()) > 0.95
