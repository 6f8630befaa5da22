"""The meaning of rms_norm in plain PyTorch."""

import torch
from torch import Tensor


def check(x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, *, weight_after_cast: bool = True) -> None:
    """Raises ValueError unless weight is [H] with H the last size of x."""
    if not x.is_floating_point():
        raise ValueError(f"rms_norm: x is {x.dtype}, expected a floating dtype")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"rms_norm: x is {list(x.shape)}, expected [..., H] with H > 0")
    if weight is not None and weight.shape != x.shape[-1:]:
        raise ValueError(f"rms_norm: weight is {list(weight.shape)}, expected [{x.shape[-1]}] from x {list(x.shape)}")
    if weight is not None and weight.device != x.device:
        raise ValueError(f"rms_norm: weight is on {weight.device}, x on {x.device}")


def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, offset: float = 0.0, *, weight_after_cast: bool = True
) -> Tensor:
    """x: [..., H], weight: [H] or None. Returns [..., H] in x.dtype."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x_wide = x.to(wide)
    y = x_wide * torch.rsqrt(x_wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return y.to(x.dtype)
    if weight_after_cast:
        y = y.to(x.dtype)
    scale = weight if offset == 0 else offset + weight.to(wide)
    return (scale * y).to(x.dtype)
