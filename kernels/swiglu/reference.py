"""The meaning of swiglu in plain PyTorch."""

import torch
import torch.nn.functional as F
from torch import Tensor


def check(gate: Tensor, up: Tensor, limit: float | None = None) -> None:
    """Raises ValueError if shapes, dtypes or devices differ, or if limit is not positive."""
    if gate.shape != up.shape or gate.dtype != up.dtype or gate.device != up.device:
        found = " and ".join(f"{list(t.shape)} {t.dtype} on {t.device}" for t in (gate, up))
        raise ValueError(f"swiglu: gate and up differ: {found}")
    if not gate.is_floating_point():
        raise ValueError(f"swiglu: gate is {gate.dtype}, expected a floating dtype")
    if limit is not None and not limit > 0:
        raise ValueError(f"swiglu: limit is {limit}, expected a positive number or None")


def swiglu(gate: Tensor, up: Tensor, limit: float | None = None) -> Tensor:
    """gate, up: [..., F]. Returns [..., F] in gate.dtype, rounded once."""
    wide = torch.promote_types(gate.dtype, torch.float32)
    gate_wide, up_wide = gate.to(wide), up.to(wide)
    if limit is not None:
        gate_wide, up_wide = gate_wide.clamp(max=limit), up_wide.clamp(-limit, limit)
    return (F.silu(gate_wide) * up_wide).to(gate.dtype)
