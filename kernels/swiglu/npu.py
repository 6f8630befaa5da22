"""swiglu by torch_npu's fused operators, which take gate and up as the two halves of one tensor."""

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from dayzero.kernels.devices import UP_TO_FLOAT32, npu_supports
from dayzero.kernels.registry import Backend


def supports(gate: Tensor, up: Tensor, limit: float | None = None) -> tuple[bool, str]:
    """(ok, reason)."""
    return npu_supports(("npu_swiglu", "npu_swiglu_backward"), UP_TO_FLOAT32, gate, up)


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        fused = _fused(gate, up)
        ctx.save_for_backward(fused)
        return torch.ops.npu.npu_swiglu(fused, dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (fused,) = ctx.saved_tensors
        return torch.ops.npu.npu_swiglu_backward(grad.contiguous(), fused, dim=-1).chunk(2, dim=-1)


def _fused(gate: Tensor, up: Tensor) -> Tensor:
    """[gate, up] as one [..., 2F]: the tensor that both are halves of if there is one, else a copy."""
    width = gate.shape[-1]
    whole = (*gate.shape[:-1], 2 * width)
    strides = torch.empty(whole, device="meta").stride()
    halves = (
        gate.untyped_storage().data_ptr() == up.untyped_storage().data_ptr()
        and up.storage_offset() == gate.storage_offset() + width
        and gate.stride() == up.stride() == strides
    )
    return gate.as_strided(whole, strides) if halves else torch.cat((gate, up), dim=-1)


def _call(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    if limit is not None:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return _SwiGLU.apply(gate, up)


backend = Backend("npu", supports, _call)
