"""Top-2 routing by sparse mixing (Liu et al. 2023, arXiv:2310.00811)."""

import torch
from torch import Tensor, nn

from .context import Context
from .router import Routing, linear


class SparseMixerRouter(Routing):
    """The best expert, then the best of the rest; the weight of each is its softmax among the near ones.

    Near the best logit m are those with (m - logit) / max(|logit|, m) <= 2 jitter. This is the deterministic form that
    the paper evaluates with; its training samples experts, which is not done here.
    """

    top_k = 2

    def __init__(self, hidden: int, experts: int, jitter: float):
        super().__init__()
        self.experts, self.jitter = experts, jitter
        self.weight = nn.Parameter(torch.empty(experts, hidden))

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)

    def forward(self, x: Tensor, context: Context | None = None) -> tuple[Tensor, Tensor]:
        logits = linear(x.to(torch.promote_types(x.dtype, torch.float32)), self.weight)
        first, one = self._best(logits, logits)
        second, two = self._best(logits, logits.scatter(-1, one, float("-inf")))
        return torch.cat((first, second), -1), torch.cat((one, two), -1)

    def _best(self, logits: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        """(weight, index), each [T, 1], of the best that is left."""
        with torch.no_grad():
            best, index = left.max(-1, keepdim=True)
            far = (best - logits) / logits.abs().clamp(min=best) > 2 * self.jitter
        return left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, index), index
