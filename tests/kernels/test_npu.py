"""What is particular to the NPU backends: declared calls, what they refuse, copies they avoid. The numbers are in each
operator's own tests, which run these backends against stand-ins of the real operators."""

import re

import pytest
import torch

from dayzero.kernels import grouped_gemm, rms_norm, swiglu

from . import npu_schemas


def test_schemas_are_as_declared(npu):
    for declaration in npu_schemas.SCHEMAS:
        name = declaration.split("(")[0]
        parsed = torch._C.parse_schema(f"npu::{declaration}")
        assert str(getattr(npu, name).default._schema) == str(parsed)


def test_misspelt_argument_is_caught(npu):
    """The stand-ins would be worth nothing if a wrong call passed."""
    with pytest.raises(RuntimeError, match="group_lists"):
        npu.npu_grouped_matmul([torch.ones(2, 3)], [torch.ones(1, 3, 4)], group_lists=torch.tensor([2]))


@pytest.mark.usefixtures("npu")
@pytest.mark.parametrize(
    ("backend", "arguments", "reason"),
    [
        (swiglu.npu.backend, (torch.ones(2, 4), torch.ones(2, 4)), "not on cpu"),
        (rms_norm.npu.backend, (torch.ones(2, 4), None, 1e-6), "not on cpu"),
        (rms_norm.npu.backend, (torch.ones(2, 4).bfloat16(), torch.ones(4), 1e-6), "dtype of x"),
        (rms_norm.npu.backend, (torch.ones(2, 4).half(), torch.ones(4).half(), 1e-6, 1.0), r"round 1.0 \+ weight"),
        (grouped_gemm.npu.backend, (torch.ones(2, 4), torch.ones(1, 3, 4), torch.tensor([2])), "not on cpu"),
    ],
)
def test_refuses_with_a_reason(backend, arguments, reason):
    ok, found = backend.supports(*arguments)
    assert not ok
    assert re.search(reason, found)


@pytest.mark.usefixtures("npu")
def test_halves_of_one_tensor_are_not_copied():
    fused = torch.randn(3, 5, 8)
    gate, up = fused.chunk(2, -1)
    assert swiglu.npu._fused(gate, up).data_ptr() == fused.data_ptr()
    assert torch.equal(swiglu.npu._fused(gate, up), fused)
    for other in (up.clone(), gate):
        copy = swiglu.npu._fused(gate, other)
        assert copy.data_ptr() != fused.data_ptr()
        assert torch.equal(copy, torch.cat((gate, other), -1))


@pytest.mark.usefixtures("npu")
def test_grouped_weight_gradient_is_rounded_once():
    """Many small terms in bfloat16: a sum kept in bfloat16 would stall."""
    x = torch.ones(2048, 8, dtype=torch.bfloat16)
    weight = torch.ones(1, 8, 8, dtype=torch.bfloat16, requires_grad=True)
    out = grouped_gemm.npu.backend.call(x, weight, torch.tensor([2048]))
    out.backward(torch.ones_like(out))
    assert weight.grad.eq(2048).all()
