import torch
from recurrences import check_packed, context, drawn

from dayzero.runtime.nn import LightningAttention


def block(dtype=torch.float64):
    made = drawn(LightningAttention(hidden=10, heads=3, head_dim=4, norm_eps=1e-5), dtype=dtype)
    made.slope.copy_(torch.tensor([0.5, 0.1, 20.0]))
    return made


def test_packed_documents_are_documents_alone():
    check_packed(block(), 10)


def test_the_block_is_its_equations():
    made = block()
    x = torch.randn(9, 10, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    q, k, v = (torch.nn.functional.silu(p(x)).unflatten(-1, (3, 4)) for p in (made.query, made.key, made.value))
    state, rows = torch.zeros(3, 4, 4, dtype=torch.float64), []
    for t in range(9):
        state = torch.exp(-made.slope)[:, None, None] * state + k[t, :, :, None] * v[t, :, None]
        rows.append((q[t, :, :, None] * state).sum(1).flatten())
    want = made.output(made.norm(torch.stack(rows)) * torch.sigmoid(made.gate(x)))
    assert torch.allclose(made(x, context((9,))), want, rtol=1e-12, atol=1e-13)


def test_the_rates_are_no_parameters_and_a_new_block_has_the_usual_ones():
    made = LightningAttention(hidden=10, heads=4, head_dim=4, norm_eps=1e-5)
    made.reset_parameters(0.02)
    assert "slope" not in dict(made.named_parameters())
    assert "slope" in made.state_dict()
    assert torch.allclose(made.slope, torch.tensor([0.25, 0.0625, 2.0**-6, 2.0**-8]))
