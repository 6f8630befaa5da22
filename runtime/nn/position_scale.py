"""Query scales that grow with the position, so that attention stays sharp over long contexts (Nakanishi 2025,
arXiv:2501.19399)."""

import torch
from torch import Tensor, nn


def stepwise_scale(position: Tensor, beta: float, step: int) -> Tensor:
    """1 + beta * log(1 + floor(position / step)): [T], float32 at least."""
    return 1 + beta * torch.log(1 + torch.floor(position / step))


class PositionScale(nn.Module):
    """scale_n * log(position + 1) + bias_n for each head n.  query: [T, N, D] -> [T, N, D]."""

    def __init__(self, heads: int):
        super().__init__()
        self.scale = nn.Parameter(torch.empty(heads))
        self.bias = nn.Parameter(torch.empty(heads))

    def reset_parameters(self, std: float) -> None:
        nn.init.zeros_(self.scale)
        nn.init.ones_(self.bias)

    def forward(self, query: Tensor, position: Tensor) -> Tensor:
        compute = torch.promote_types(query.dtype, torch.float32)
        growth = (position + 1).to(compute).log()
        factor = self.scale.to(compute) * growth[:, None] + self.bias.to(compute)
        return query * factor[..., None].to(query.dtype)
