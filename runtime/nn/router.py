"""The router: which experts see a token, and with what weight (Shazeer et al. 2017, arXiv:1701.06538)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Score = Literal["softmax", "sigmoid", "softmax_selected"]


class Router(nn.Module):
    """x: [T, H] -> weights [T, K] and expert index [T, K] int64, in float32 at least.

    score: of the logits over all experts ("softmax", "sigmoid"), or softmax over the selected logits alone.
    renormalise: divide the selected weights by (their sum + renormalise_eps). scale: multiplies the weights.
    """

    def __init__(
        self,
        hidden: int,
        experts: int,
        top_k: int,
        score: Score = "softmax",
        renormalise: bool = False,
        renormalise_eps: float = 0.0,
        scale: float = 1.0,
    ):
        super().__init__()
        self.experts, self.top_k, self.score = experts, top_k, score
        self.renormalise, self.renormalise_eps, self.scale = renormalise, renormalise_eps, scale
        self.weight = nn.Parameter(torch.empty(experts, hidden))

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        compute = torch.promote_types(x.dtype, torch.float32)
        logits = F.linear(x.to(compute), self.weight.to(compute))
        weights, index = torch.topk(self._scores(logits), self.top_k, dim=-1)
        if self.score == "softmax_selected":
            weights = weights.softmax(-1)
        if self.renormalise:
            total = weights.sum(-1, keepdim=True)
            weights = weights / (total + self.renormalise_eps if self.renormalise_eps else total)
        if self.scale != 1.0:
            weights = weights * self.scale
        return weights, index

    def _scores(self, logits: Tensor) -> Tensor:
        match self.score:
            case "softmax":
                return logits.softmax(-1)
            case "sigmoid":
                return logits.sigmoid()
        return logits
