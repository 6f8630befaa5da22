"""rms_norm: every backend against the float64 reference, the reference against transformers and torch."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import gradcheck
from torch.func import functional_call
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from dayzero.kernels.rms_norm import reference, rms_norm

from .compare import assert_as_good_as, gradients, relative_error, wide

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16]
FORMS = {  # name: has a weight, offset, weight_after_cast
    "llama": (True, 0.0, True),
    "gemma": (True, 1.0, False),
    "bare": (False, 0.0, True),
}
# npu_rms_norm cannot hold offset + weight in bfloat16, so its backend refuses that: test_npu.
CASES = [
    (backend, form, dtype)
    for backend in ("triton", "npu", "blocked")
    for form, (_, offset, _) in FORMS.items()
    for dtype in DTYPES
    if not (backend == "npu" and offset and dtype == torch.bfloat16)
]
backends = pytest.mark.parametrize("backend", ["triton", "npu", "blocked"])


def inputs(rng, shape, dtype, has_weight=True, offset=0.0):
    return {
        "x": rng(shape, dtype, scale=3),
        "weight": rng(shape[-1:], dtype) if has_weight else None,
        "eps": EPS,
        "offset": offset,
    }


@pytest.mark.parametrize(("backend", "form", "dtype"), CASES)
@pytest.mark.parametrize("shape", [(1, 16), (3, 5, 50), (0, 16), (7, 2100), (70, 129), (2, 3)])
def test_agrees_with_float64(evaluate, backend, form, dtype, shape, rng):
    has_weight, offset, after_cast = FORMS[form]
    given = inputs(rng, shape, dtype, has_weight, offset)
    options = {"weight_after_cast": after_cast}
    assert_as_good_as(
        evaluate("rms_norm", backend, given, **options),
        gradients(reference.rms_norm, given, **options),
        gradients(reference.rms_norm, wide(given), **options),
        dtype,
    )


@pytest.mark.parametrize(("form", "other"), [("llama", "gemma"), ("gemma", "llama")])
def test_kernel_rounds_where_the_reference_does(evaluate, form, other, rng):
    """Not all bits: the last one of 1 / sqrt differs now and then."""
    _, offset, after_cast = FORMS[form]
    given = inputs(rng, (20, 100), torch.bfloat16, offset=offset)
    out = evaluate("rms_norm", "triton", given, weight_after_cast=after_cast)["out"]
    right, wrong = (reference.rms_norm(*given.values(), weight_after_cast=FORMS[name][2]) for name in (form, other))
    assert (out == right).float().mean() > 0.99
    assert (out == wrong).float().mean() < 0.9


@backends
def test_strided_input(evaluate, backend, rng):
    given = inputs(rng, (6, 40), torch.float32)
    strided = given | {"x": rng((6, 80))[:, ::2], "weight": rng((80,))[::2]}
    dense = strided | {"x": strided["x"].contiguous(), "weight": strided["weight"].contiguous()}
    got, want = evaluate("rms_norm", backend, strided), evaluate("rms_norm", backend, dense)
    assert all(torch.equal(got[name], want[name]) for name in want)


@backends
def test_recompute_changes_nothing(evaluate, backend, rng):
    given = inputs(rng, (5, 48), torch.bfloat16)
    kept, again = (evaluate("rms_norm", backend, given, recompute=recompute) for recompute in (False, True))
    assert all(torch.equal(kept[name], again[name]) for name in kept)


@pytest.mark.parametrize(("frozen", "expected"), [((), (1, 1)), (("weight",), (1, 0)), (("x",), (0, 1))])
def test_frozen_input_costs_nothing(interpreter, frozen, expected, rng):
    given = inputs(rng, (5, 48), torch.float32)
    target = "dayzero.kernels.rms_norm.kernel:rms_norm"
    for kernel, count in zip(("rms_norm_backward", "rms_norm_weight_backward"), expected, strict=True):
        assert interpreter.call("compare:launches", target, kernel, given, frozen) == count, kernel


@backends
def test_nan_stays(evaluate, backend, rng):
    given = inputs(rng, (4, 16), torch.float32)
    given["x"][2, 3] = float("nan")
    out = evaluate("rms_norm", backend, given)["out"]
    assert out.isnan().all(1).tolist() == [False, False, True, False]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("peer", "form"), [(LlamaRMSNorm, "llama"), (GemmaRMSNorm, "gemma")], ids=["llama", "gemma"])
@pytest.mark.parametrize("backend", ["reference", "blocked", "triton"])
def test_beside_transformers(evaluate, backend, peer, form, dtype, rng):
    """The reference has its bits. Other backends do not round gradients on their way, as Llama's norm does after its
    cast, and sum in another order: their bits differ, and are nearer to the exact gradients."""
    _, offset, after_cast = FORMS[form]
    given = inputs(rng, (300, 96), dtype, offset=offset)
    module = peer(96, eps=EPS).to(dtype)
    theirs = gradients(lambda x, weight, *_: functional_call(module, {"weight": weight}, (x,)), given)
    exact = gradients(reference.rms_norm, wide(given), weight_after_cast=after_cast)
    got = evaluate("rms_norm", backend, given, weight_after_cast=after_cast)
    same = {name: (got[name] == theirs[name]).double().mean().item() for name in theirs}
    if backend == "reference":
        assert same == {"out": 1.0, "x": 1.0, "weight": 1.0}
    if backend == "blocked":
        assert same["out"] == 1.0
    if dtype != torch.float32:  # what float32 holds in between rarely changes the last bit
        assert same["out"] > 0.99
        assert after_cast or min(same.values()) > 0.99
    more = 1.05 if dtype == torch.float32 else 1.001
    for name, want in exact.items():
        assert relative_error(got[name], want) <= more * relative_error(theirs[name], want), name


def test_same_values_as_torch(rng):
    x, weight = rng((9, 33), torch.float64), rng((33,), torch.float64)
    assert relative_error(reference.rms_norm(x, weight, EPS), F.rms_norm(x, (33,), weight, EPS)) < 1e-14
    assert relative_error(reference.rms_norm(x, None, EPS), F.rms_norm(x, (33,), None, EPS)) < 1e-14


def test_small_gemma_weights_survive_bfloat16(rng):
    """1 + 0.003 rounds to 1 in bfloat16, so the sum must not be taken there."""
    x, weight = rng((4, 64), torch.bfloat16), torch.full((64,), 0.003, dtype=torch.bfloat16)
    scaled = rms_norm(x.float(), weight.float(), EPS, 1.0).double()
    assert relative_error(rms_norm(x, weight, EPS, 1.0, weight_after_cast=False), scaled) < 2e-3
    bare = rms_norm(x, None, EPS)
    assert not torch.equal(rms_norm(x, weight, EPS, 1.0), bare)


@pytest.mark.parametrize("form", FORMS)
def test_reference_gradient(form, rng):
    has_weight, offset, after_cast = FORMS[form]
    x = rng((3, 5), torch.float64).requires_grad_()
    weight = rng((5,), torch.float64).requires_grad_() if has_weight else None
    assert gradcheck(lambda x, w: reference.rms_norm(x, w, EPS, offset, weight_after_cast=after_cast), (x, weight))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.ones(2, 6), torch.ones(5), r"weight is \[5\], expected \[6\]"),
        (torch.ones(2, 6), torch.ones(1, 6), r"weight is \[1, 6\]"),
        (torch.ones(2, 6, dtype=torch.int64), None, "int64"),
        (torch.ones(2, 0), None, r"\[2, 0\]"),
        (torch.ones(2, 6), torch.ones(6, device="meta"), "on meta"),
    ],
)
def test_refuses(x, weight, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(x, weight, EPS)
