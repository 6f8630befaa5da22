"""A learned gate for every channel between the residual stream and a branch."""

import torch
from torch import Tensor, nn


class ResidualGate(nn.Module):
    """y = a * x + b * branch, with b = sigmoid(gate / temperature) and a = sqrt(max((1 - b) (1 + b), eps)).

    x, branch: [T, H]; a^2 + b^2 = 1, so that a stream and a branch of one size and no correlation keep it.
    branch_first: the order of the inputs. Computed in float32 at least.
    """

    def __init__(self, hidden: int, temperature: float, eps: float, branch_first: bool = False):
        super().__init__()
        self.temperature, self.eps, self.branch_first = temperature, eps, branch_first
        self.gate = nn.Parameter(torch.empty(hidden))

    def reset_parameters(self, std: float) -> None:
        nn.init.zeros_(self.gate)

    def forward(self, first: Tensor, second: Tensor) -> Tensor:
        x, branch = (second, first) if self.branch_first else (first, second)
        logits = self.gate.to(torch.promote_types(x.dtype, torch.float32)) / self.temperature
        opened = logits.sigmoid()
        closed = ((-logits).sigmoid() * (1.0 + opened)).clamp(min=self.eps).sqrt()
        return (closed * x + opened * branch).to(x.dtype)
