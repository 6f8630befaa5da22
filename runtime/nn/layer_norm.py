"""Layer norm (Ba et al. 2016, arXiv:1607.06450)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LayerNorm(nn.Module):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.  x: [..., width] -> [..., width].

    scaled, bias: whether there is a weight, a bias. Statistics are float32 at least.
    """

    def __init__(self, width: int, eps: float, scaled: bool = True, bias: bool = False):
        super().__init__()
        self.width, self.eps = width, eps
        self.weight = nn.Parameter(torch.empty(width)) if scaled else None
        self.bias = nn.Parameter(torch.empty(width)) if bias else None

    def reset_parameters(self, std: float) -> None:
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        weight, bias = (None if p is None else p.to(wide) for p in (self.weight, self.bias))
        return F.layer_norm(x.to(wide), (self.width,), weight, bias, self.eps).to(x.dtype)
