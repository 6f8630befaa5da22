"""Softmax attention whose scores have a bias by distance that each token makes for itself."""

from typing import ClassVar

import torch
from torch import Tensor, nn

from .attend import Bias
from .attention import GroupedQueryAttention
from .context import Context
from .linear import reset_linear


class RelativeAttention(nn.Module):
    """`attention` with a bias instead of positions.  x: [T, H] -> [T, H].

    Each token mixes `relative_dim` learned profiles over distances (profiles: [relative_dim, extent]) into one bias for
    each head: bias[t, n, age] = sum_d relative(x)[t, n, d] * profiles[d, age], 0 for ages of `extent` and more, which
    is added to the scaled scores. Where queries grow with their position, so does their bias.
    """

    uses_context = True
    context_parallel = True
    lora_targets = ("relative",)
    parallel_roles: ClassVar[dict[str, str]] = {"relative": "column", "profiles": "replicate"}

    def __init__(self, attention: GroupedQueryAttention, relative_dim: int, extent: int):
        super().__init__()
        self.attention, self.extent = attention, extent
        hidden = attention.query.in_features
        self.relative = nn.Linear(hidden, attention.heads * relative_dim, bias=False)
        self.profiles = nn.Parameter(torch.empty(relative_dim, extent))

    def reset_parameters(self, std: float) -> None:
        reset_linear(self.relative, std)
        nn.init.normal_(self.profiles, std=std)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.attention(x, context, self.bias(x, context))

    def bias(self, x: Tensor, context: Context) -> Bias:
        """For the tokens of the batch, as `attend` asks for it."""
        by_age = self.relative(x).unflatten(-1, (self.attention.heads, -1)) @ self.profiles  # [T, N, extent]
        growth = self.attention.growth(context, x.dtype)
        if growth is not None:
            by_age = by_age * growth[:, None, None].to(by_age.dtype)

        def of(first: int, age: Tensor) -> Tensor:
            rows = by_age[first : first + age.shape[0]].transpose(0, 1)  # [N, Q, extent]
            index = age.clamp(0, self.extent - 1).expand(rows.shape[0], -1, -1)
            return rows.gather(-1, index).masked_fill((age < 0) | (age >= self.extent), 0.0)

        return of
