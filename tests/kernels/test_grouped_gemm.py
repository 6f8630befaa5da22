"""grouped_gemm: every backend against the float64 reference, the reference against torch's own grouped product."""

from collections import Counter

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch.autograd import gradcheck
from torch.utils._python_dispatch import TorchDispatchMode

from dayzero.kernels.grouped_gemm import autograd, bucketed, grouped_gemm, grouped_mm, reference

from .compare import assert_as_good_as, gradients, relative_error, wide

DTYPES = {
    "triton": [torch.float32, torch.bfloat16],
    "torch": [torch.float32, torch.bfloat16],
    "bucketed": [torch.bfloat16],
    "npu": [torch.bfloat16],
}
CASES = [(backend, dtype) for backend, dtypes in DTYPES.items() for dtype in dtypes]
SIZES = {  # name: counts, N, K, rows past the counts
    "ragged": ([5, 0, 33, 1], 40, 24, 0),
    "first and last empty": ([0, 17, 0], 16, 56, 0),
    "tail": ([3, 0, 20], 24, 16, 6),
    "no row used": ([0, 0], 8, 16, 5),
    "no rows": ([0, 0, 0], 8, 16, 0),
    "one expert, several tiles": ([150], 136, 264, 0),
    "a last expert without room to round up": ([16, 70, 1], 24, 40, 3),
}


def inputs(rng, counts, n, k, tail, dtype):
    rows = sum(counts) + tail
    return {
        "x": rng((rows, k), dtype),
        "weight": rng((len(counts), n, k), dtype),
        "counts": torch.tensor(counts),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "dtype"), CASES)
@pytest.mark.parametrize("sizes", SIZES)
def test_agrees_with_float64(evaluate, backend, dtype, sizes, rng):
    given = inputs(rng, *SIZES[sizes], dtype)
    got = evaluate("grouped_gemm", backend, given)
    exact = gradients(reference.grouped_gemm, wide(given))
    assert_as_good_as(got, gradients(reference.grouped_gemm, given), exact, dtype)
    used = int(given["counts"].sum())
    assert not got["out"][used:].any()
    assert not got["x"][used:].any()
    assert not got["weight"][given["counts"] == 0].any()


@pytest.mark.parametrize("backend", DTYPES)
def test_strided_input(evaluate, backend, rng):
    dtype = torch.bfloat16
    strided = {
        "x": rng((48, 26), dtype).t()[:, ::2],
        "weight": rng((24, 40, 3), dtype).permute(2, 1, 0),
        "counts": torch.tensor([4, 0, 20]),
    }
    dense = {name: value.contiguous() for name, value in strided.items()}
    assert not any(strided[name].is_contiguous() for name in ("x", "weight"))
    got, want = evaluate("grouped_gemm", backend, strided), evaluate("grouped_gemm", backend, dense)
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize("backend", DTYPES)
def test_nan_stays_with_its_expert(evaluate, backend, rng):
    given = inputs(rng, [3, 2, 4], 16, 24, 1, torch.bfloat16)
    given["x"][3, 5] = float("nan")
    got = evaluate("grouped_gemm", backend, given)
    assert got["out"].isnan().any(1).nonzero().flatten().tolist() == [3]
    assert got["weight"].isnan().flatten(1).any(1).tolist() == [False, True, False]
    assert got["x"].isfinite().all()


@pytest.mark.parametrize("backend", DTYPES)
def test_recompute_changes_nothing(evaluate, backend, rng):
    given = inputs(rng, [5, 0, 12], 16, 24, 2, torch.bfloat16)
    kept, again = (evaluate("grouped_gemm", backend, given, recompute=recompute) for recompute in (False, True))
    assert all(torch.equal(kept[name], again[name]) for name in kept)


class Counting(TorchDispatchMode):
    """Counts the operators that run under it, by name."""

    def __init__(self):
        super().__init__()
        self.calls = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.calls[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("backend", "operators", "expected"),
    [
        ("torch", ["_grouped_mm"], {"": 3, "weight": 2, "x": 2}),
        ("bucketed", ["mm"], {"": 9, "weight": 6, "x": 6}),
        ("npu", ["npu_grouped_matmul", "npu_grouped_matmul_add_"], {"": 3, "weight": 2, "x": 2}),
        ("reference", ["mm"], {"": 9, "weight": 6, "x": 6}),  # three experts
    ],
)
@pytest.mark.parametrize("frozen", ["", "weight", "x"])
def test_frozen_input_costs_nothing(evaluate, backend, operators, expected, frozen, rng):
    given = inputs(rng, [5, 4, 12], 16, 24, 0, torch.bfloat16)
    with Counting() as counting:
        result = evaluate("grouped_gemm", backend, given, frozen=(frozen,) if frozen else ())
    assert sum(counting.calls[name] for name in operators) == expected[frozen]
    assert not frozen or result[frozen] is None


@pytest.mark.parametrize(("frozen", "expected"), [((), (2, 1)), (("weight",), (2, 0)), (("x",), (1, 1))])
def test_frozen_input_launches_nothing(interpreter, frozen, expected, rng):
    given = inputs(rng, [5, 0, 12], 16, 24, 0, torch.float32)
    target = "dayzero.kernels.grouped_gemm.kernel:grouped_gemm"
    for kernel, count in zip(("grouped_rows", "grouped_weights"), expected, strict=True):
        assert interpreter.call("compare:launches", target, kernel, given, frozen) == count, kernel


def test_frozen_weight_keeps_no_input(rng):
    given = inputs(rng, [5, 0, 12], 16, 24, 0, torch.float32)
    kept = []
    x = given["x"].requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.data_ptr()) or t, lambda t: t):
        grouped_mm.backend.call(x, given["weight"], given["counts"])
    assert given["weight"].data_ptr() in kept
    assert x.data_ptr() not in kept


@pytest.mark.parametrize("dtype", DTYPES["torch"])
def test_same_values_as_torch(dtype, rng):
    given = inputs(rng, [5, 0, 33, 2], 40, 24, 0, dtype)
    ends = given["counts"].cumsum(0).int()
    peer = torch._grouped_mm(given["x"], given["weight"].transpose(1, 2), offs=ends)
    assert torch.equal(reference.grouped_gemm(*given.values()), peer)
    assert torch.equal(grouped_gemm(*given.values()), peer)


def test_few_heights_for_all_numbers_of_rows():
    heights = [bucketed.height(rows) for rows in range(1, 4097)]
    assert all(rows <= height <= max(16, rows * 17 / 16) + 16 for rows, height in enumerate(heights, 1))
    assert len(set(heights)) == 80
    assert bucketed.height(0) == 0


def test_float64_goes_to_the_reference(rng):
    given = inputs(rng, [2, 0, 3], 5, 7, 1, torch.float64)
    want = torch.stack([x @ given["weight"][e].t() for e, x in zip([0, 0, 2, 2, 2], given["x"], strict=False)])
    assert relative_error(grouped_gemm(*given.values())[:5], want) < 1e-15


def test_reference_gradient(rng):
    given = wide(inputs(rng, [2, 0, 3], 4, 3, 1, torch.float64))
    x, weight = given["x"].requires_grad_(), given["weight"].requires_grad_()
    assert gradcheck(lambda x, w: reference.grouped_gemm(x, w, given["counts"]), (x, weight))


@pytest.mark.parametrize("readable", [True, False])
def test_tail_and_check_without_reading_the_counts(monkeypatch, readable, rng):
    """On a device nothing may wait for the counts, so the same is done there with device operations."""
    monkeypatch.setattr(autograd, "_readable", lambda ends: readable)
    given = inputs(rng, *SIZES["tail"], torch.bfloat16)
    out = grouped_mm.backend.call(*given.values())
    assert torch.equal(out, reference.grouped_gemm(*given.values()))
    with pytest.raises(ValueError if readable else RuntimeError, match=r"sum\(counts\) exceeds the 29 rows"):
        grouped_mm.backend.call(given["x"], given["weight"], given["counts"] + 3)


def test_fake_tensors():
    """A plan of memory runs the model on tensors without values."""
    with torch._subclasses.FakeTensorMode():
        x = torch.ones(6, 16, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.ones(3, 24, 16, dtype=torch.bfloat16, requires_grad=True)
        out = grouped_gemm(x, weight, torch.ones(3, dtype=torch.int64))
        out.sum().backward()
        assert (out.shape, x.grad.shape, weight.grad.shape) == ((6, 24), x.shape, weight.shape)


@pytest.mark.parametrize(
    ("backend", "dtype"),
    [(name, torch.float32) for name in ("reference", "torch", "triton")] + [("bucketed", torch.bfloat16)],
)
def test_refuses_more_rows_than_there_are(evaluate, backend, dtype, rng):
    given = inputs(rng, [5, 8], 8, 16, 0, dtype)
    given["counts"][1] = 9
    with pytest.raises((ValueError, RuntimeError), match="counts"):
        evaluate("grouped_gemm", backend, given)


@pytest.mark.parametrize(
    ("x", "weight", "counts", "message"),
    [
        (torch.ones(4, 6), torch.ones(2, 6, 5), torch.tensor([2, 2]), r"\[4, 6\], weight \[2, 6, 5\]"),
        (torch.ones(4, 6), torch.ones(2, 5, 6), torch.tensor([4]), r"\[1\]"),
        (torch.ones(4, 6), torch.ones(2, 5, 6), torch.tensor([2, 2]).int(), "int32"),
        (torch.ones(4, 6), torch.ones(2, 5, 6).double(), torch.tensor([2, 2]), "float64"),
        (torch.ones(4, 6), torch.ones(2, 0, 6), torch.tensor([2, 2]), "no empty dimension"),
        (torch.ones(4, 6, device="meta"), torch.ones(2, 5, 6), torch.tensor([2, 2]), "one device"),
    ],
)
def test_refuses(x, weight, counts, message):
    with pytest.raises(ValueError, match=message):
        grouped_gemm(x, weight, counts)


@hypothesis.settings(max_examples=50, deadline=None)
@hypothesis.given(
    counts=st.lists(st.integers(0, 40), min_size=1, max_size=6), tail=st.integers(0, 20), tile=st.sampled_from([1, 8])
)
def test_tiles_cover_every_row_once(interpreter, counts, tail, tile):
    ends = torch.tensor(counts).cumsum(0)
    height = sum(counts) + tail
    table = interpreter.call("dayzero.kernels.grouped_gemm.kernel:tile_table", ends, height, tile)
    owner = [expert for expert, count in enumerate([*counts, tail]) for _ in range(count)]
    found = [expert for expert, first, end in table.tolist() for _ in range(first, end)]
    rows = [row for _, first, end in table.tolist() for row in range(first, end)]
    assert rows == list(range(height))
    assert found == owner
