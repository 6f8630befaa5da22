"""Forms of the gate of a gated feed-forward layer that are more than act(gate) * up. None has parameters."""

import torch
from torch import Tensor, nn

from dayzero.kernels.swiglu import swiglu

from .activation import Activation, activation


class ClampedGLU(nn.Module):
    """act(gate) * up, gate clamped above and up on both sides, so that no activation is too large for 8 bits.

    after: clamp act(gate) instead of gate. An infinite limit clamps nothing. gate, up: [..., F] -> [..., F].
    """

    def __init__(self, act: Activation, limit: float, after: bool = False):
        super().__init__()
        self.act: Activation = act
        self.limit, self.after = limit, after

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        if self.act == "silu" and not self.after:
            return swiglu(gate, up, self.limit)
        if self.after:
            return activation(self.act)(gate).clamp(max=self.limit) * up.clamp(-self.limit, self.limit)
        return activation(self.act)(gate.clamp(max=self.limit)) * up.clamp(-self.limit, self.limit)


class OaiSwiGLU(nn.Module):
    """g * sigmoid(alpha g) * (u + 1) with g = min(gate, limit) and u = up clamped to [-limit, limit].

    The gate of the gpt-oss model card (OpenAI 2025, arXiv:2508.10925); alpha 1.702 makes it a sigmoid approximation of
    GELU (Hendrycks and Gimpel 2016, arXiv:1606.08415). gate, up: [..., F] -> [..., F].
    """

    def __init__(self, alpha: float, limit: float):
        super().__init__()
        self.alpha, self.limit = alpha, limit

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(gate * self.alpha) * (up + 1)


class SoftcappedGLU(nn.Module):
    """cap_g tanh(gate / cap_g) * sigmoid(gate) * cap_u tanh(up / cap_u): SwiGLU that cannot exceed cap_g cap_u (SiTU).

    Computed in float32 at least. gate, up: [..., F] -> [..., F].
    """

    def __init__(self, gate_cap: float, up_cap: float):
        super().__init__()
        self.gate_cap, self.up_cap = gate_cap, up_cap

    def forward(self, gate: Tensor, up: Tensor) -> Tensor:
        wide = torch.promote_types(gate.dtype, torch.float32)
        g, u = gate.to(wide), up.to(wide)
        capped = torch.tanh(g / self.gate_cap) * self.gate_cap * torch.sigmoid(g)
        return (capped * torch.tanh(u / self.up_cap) * self.up_cap).to(gate.dtype)


Gate = Activation | ClampedGLU | OaiSwiGLU | SoftcappedGLU


def gated(act: Gate, gate: Tensor, up: Tensor) -> Tensor:
    """The gated value, through the fused operator where there is one. gate, up: [..., F] -> [..., F].

    act: the name of an activation for act(gate) * up, or one of the forms above.
    """
    if isinstance(act, str):
        return swiglu(gate, up) if act == "silu" else activation(act)(gate) * up
    return act(gate, up)
