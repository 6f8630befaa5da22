"""A router of one expert a token, with a limit on how many tokens an expert takes (Fedus et al. 2021,
arXiv:2101.03961)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .context import Context
from .router import Routing, linear


class TopOneRouter(Routing):
    """The likeliest expert by softmax; its probability is the weight.

    capacity: of each document an expert takes that many tokens, in order; the others get class `experts` - 1, the
    last, which the mixture must give no expert. W: [experts - 1, H].
    """

    uses_context = True
    top_k = 1

    def __init__(self, hidden: int, experts: int, capacity: int, logit_bias: bool = False):
        super().__init__()
        self.experts, self.capacity = experts, capacity
        self.weight = nn.Parameter(torch.empty(experts - 1, hidden))
        self.logit_bias = nn.Parameter(torch.empty(experts - 1)) if logit_bias else None

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)
        if self.logit_bias is not None:
            nn.init.zeros_(self.logit_bias)

    def forward(self, x: Tensor, context: Context | None = None) -> tuple[Tensor, Tensor]:
        if context is None:
            raise ValueError("this router counts tokens by document, and was given no context")
        logits = linear(x.to(torch.promote_types(x.dtype, torch.float32)), self.weight, self.logit_bias)
        weights, index = logits.softmax(-1).max(-1, keepdim=True)
        chosen = F.one_hot(index[:, 0], self.experts - 1)
        place = torch.cat([part.cumsum(0) for part in chosen.split(context.lengths)]) if context.lengths else chosen
        over = place.gather(-1, index) > self.capacity
        return weights, index.masked_fill(over, self.experts - 1)
