"""swiglu: every backend against the float64 reference, the reference against torch."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck

from dayzero.kernels.swiglu import reference, swiglu

from .compare import assert_as_good_as, gradients, relative_error, wide

LIMIT = 7.0
DTYPES = [torch.float32, torch.bfloat16]
backends = pytest.mark.parametrize("backend", ["triton", "npu", "blocked"])


def inputs(rng, shape, dtype, limit=None):
    """Large enough that the clamp bites, with some values exactly at the limit."""
    gate, up = rng(shape, dtype, scale=10), rng(shape, dtype, scale=10)
    gate[..., ::5] = LIMIT
    up[..., ::7] = -LIMIT
    return {"gate": gate, "up": up, "limit": limit}


@backends
@pytest.mark.parametrize("limit", [None, LIMIT])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 16), (7, 48), (0, 16), (129, 272), (2, 3, 1030), (5, 1)])
def test_agrees_with_float64(evaluate, backend, shape, dtype, limit, rng):
    given = inputs(rng, shape, dtype, limit)
    assert_as_good_as(
        evaluate("swiglu", backend, given),
        gradients(reference.swiglu, given),
        gradients(reference.swiglu, wide(given)),
        dtype,
    )


@backends
@pytest.mark.parametrize("layout", ["halves", "swapped halves", "one half", "every other", "transposed"])
def test_strided_input(evaluate, backend, layout, rng):
    both = rng((6, 80))
    gate, up = {
        "halves": both.chunk(2, -1),
        "swapped halves": both.chunk(2, -1)[::-1],
        "one half": (both[:, :40], rng((6, 40))),
        "every other": (both[:, ::2], both[:, 1::2]),
        "transposed": (both.t()[:40], both.t()[40:]),
    }[layout]
    strided = {"gate": gate, "up": up}
    dense = {name: value.contiguous() for name, value in strided.items()}
    got, want = evaluate("swiglu", backend, strided), evaluate("swiglu", backend, dense)
    assert all(torch.equal(got[name], want[name]) for name in want)


@backends
def test_recompute_changes_nothing(evaluate, backend, rng):
    given = inputs(rng, (5, 48), torch.bfloat16, LIMIT)
    kept, again = (evaluate("swiglu", backend, given, recompute=recompute) for recompute in (False, True))
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@backends
@pytest.mark.parametrize("frozen", ["gate", "up"])
def test_frozen_input(evaluate, backend, frozen, rng):
    given = inputs(rng, (5, 48), torch.float32)
    whole, part = evaluate("swiglu", backend, given), evaluate("swiglu", backend, given, frozen=(frozen,))
    assert part.pop(frozen) is None
    assert all(torch.equal(value, whole[name]) for name, value in part.items())


@backends
@pytest.mark.parametrize("limit", [None, LIMIT])
def test_nan_stays(evaluate, backend, limit, rng):
    given = inputs(rng, (2, 16), torch.float32, limit)
    given["gate"][0, 1] = float("nan")
    given["up"][1, 2] = float("nan")
    out = evaluate("swiglu", backend, given)["out"]
    assert out.isnan().nonzero().tolist() == [[0, 1], [1, 2]]


def test_far_gates_are_finite(evaluate):
    gate = torch.tensor([[-1e4, -100.0, -0.0, 100.0, 1e4]])
    got = evaluate("swiglu", "triton", {"gate": gate, "up": torch.ones_like(gate)})
    assert got["out"].tolist() == [[0.0, 0.0, 0.0, 100.0, 1e4]]
    assert got["gate"].isfinite().all()


def test_same_bits_as_torch_in_float32(rng):
    gate, up = rng((7, 48), scale=10), rng((7, 48))
    assert torch.equal(swiglu(gate, up), F.silu(gate) * up)


def test_one_rounding_beats_two_in_bfloat16(rng):
    gate, up = rng((64, 48), torch.bfloat16, scale=3), rng((64, 48), torch.bfloat16)
    exact = F.silu(gate.double()) * up.double()
    assert relative_error(swiglu(gate, up), exact) < 0.8 * relative_error(F.silu(gate) * up, exact)


@pytest.mark.parametrize("limit", [None, 1.5])
def test_reference_gradient(limit, rng):
    gate, up = (rng((3, 5), torch.float64, scale=2).requires_grad_() for _ in range(2))
    assert gradcheck(lambda gate, up: reference.swiglu(gate, up, limit), (gate, up))


@pytest.mark.parametrize(
    ("gate", "up", "limit", "message"),
    [
        (torch.ones(2, 6), torch.ones(2, 5), None, r"\[2, 6\].*\[2, 5\]"),
        (torch.ones(2, 6), torch.ones(2, 6).double(), None, "float64"),
        (torch.ones(2, 6), torch.ones(2, 6, device="meta"), None, "on meta"),
        (torch.ones(2, 6).int(), torch.ones(2, 6).int(), None, "int32"),
        (torch.ones(2, 6), torch.ones(2, 6), 0.0, "limit is 0.0"),
    ],
)
def test_refuses(gate, up, limit, message):
    with pytest.raises(ValueError, match=message):
        swiglu(gate, up, limit)
