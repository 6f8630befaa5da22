"""The torch_npu operators that our code calls: their declarations, copied from torch_npu 2.13.0
(torch_npu/csrc/aten/npu_native_functions_by_codegen.yaml), and what they compute, on a CPU, in float32.

Defining them makes every call of ours run against the real argument names, kinds and types.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

SCHEMAS = (
    "npu_rms_norm(Tensor self, Tensor gamma, float epsilon=1e-06) -> (Tensor, Tensor)",
    "npu_swiglu(Tensor self, int dim=-1) -> Tensor",
    "npu_swiglu_backward(Tensor grad_output, Tensor self, int dim=-1) -> Tensor",
    "npu_grouped_matmul(Tensor[] x, Tensor[] weight, *, Tensor[]? bias=None, Tensor[]? scale=None, "
    "Tensor[]? offset=None, Tensor[]? antiquant_scale=None, Tensor[]? antiquant_offset=None, "
    "Tensor[]? per_token_scale=None, Tensor? group_list=None, Tensor[]? activation_input=None, "
    "Tensor[]? activation_quant_scale=None, Tensor[]? activation_quant_offset=None, int? split_item=0, "
    "int? group_type=None, int? group_list_type=0, int? act_type=0, int[]? tuning_config=None, "
    "int? output_dtype=None, int? x_dtype=None, int? weight_dtype=None, int? scale_dtype=None, "
    "int? per_token_scale_dtype=None) -> Tensor[]",
    "npu_grouped_matmul_add_(Tensor(a!) self, Tensor x, Tensor weight, Tensor group_list, *, bool transpose_x=True, "
    "bool transpose_weight=False, int group_type=2, int? group_list_type=0) -> Tensor(a!)",
)


def define() -> torch.library.Library:
    """Register the stand-ins; they last as long as the returned library. As in torch_npu, rms_norm alone has a
    gradient among those we do not differentiate ourselves."""
    library = torch.library.Library("npu", "DEF")
    for schema in SCHEMAS:
        library.define(schema)
    library.impl("npu_rms_norm", _rms_norm, "CompositeImplicitAutograd")
    library.impl("npu_swiglu", _swiglu, "CPU")
    library.impl("npu_swiglu_backward", _swiglu_backward, "CPU")
    library.impl("npu_grouped_matmul", _grouped_matmul, "CPU")
    library.impl("npu_grouped_matmul_add_", _grouped_matmul_add_, "CPU")
    return library


def _rms_norm(x: Tensor, gamma: Tensor, epsilon: float = 1e-6) -> tuple[Tensor, Tensor]:
    assert gamma.dtype == x.dtype
    rstd = x.float().pow(2).mean(-1, keepdim=True).add(epsilon).rsqrt()
    return (x.float() * rstd * gamma.float()).to(x.dtype), rstd


def _swiglu(x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.float().chunk(2, dim)
    return (F.silu(gate) * up).to(x.dtype)


def _swiglu_backward(grad_output: Tensor, x: Tensor, dim: int = -1) -> Tensor:
    gate, up = x.float().chunk(2, dim)
    s, dy = gate.sigmoid(), grad_output.float()
    return torch.cat((dy * up * s * (1 + gate * (1 - s)), dy * gate * s), dim).to(x.dtype)


def _grouped_matmul(x, weight, *, group_list=None, split_item=0, group_type=None, group_list_type=0, **unused):
    """One x, one weight [E, K, N], group_list a running sum over rows. Rows past it are garbage, as on a device."""
    assert (len(x), len(weight), split_item, group_type, group_list_type) == (1, 1, 3, 0, 0)
    assert all(value in (None, 0) for value in unused.values())
    out = x[0].new_full((x[0].shape[0], weight[0].shape[2]), float("nan"))
    start = 0
    for matrix, end in zip(weight[0], group_list.tolist(), strict=True):
        out[start:end] = x[0][start:end] @ matrix
        start = end
    return [out]


def _grouped_matmul_add_(
    total, x, weight, group_list, *, transpose_x=True, transpose_weight=False, group_type=2, group_list_type=0
):
    """total [E, M, N] float32 += x[rows].T @ weight[rows], rows between successive ends of group_list."""
    assert (transpose_x, transpose_weight, group_type, group_list_type) == (True, False, 2, 0)
    assert total.dtype == torch.float32
    start = 0
    for matrix, end in zip(total, group_list.tolist(), strict=True):
        matrix += x[start:end].float().t() @ weight[start:end].float()
        start = end
    return total
