"""A router that weighs the shared experts together with the selected ones."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .context import Context
from .router import Routing, linear


class JointRouter(Routing):
    """weights [T, K + S]: sigmoid(logit) of the K selected and the S shared experts, divided by their sum, times scale
    and the learned `factor`.

    W: [E + S, H], the shared experts last. The selection is by sigmoid(logit) + selection_bias, a float32 buffer.
    """

    def __init__(self, hidden: int, experts: int, shared: int, top_k: int, scale: float = 1.0):
        super().__init__()
        self.experts, self.shared, self.top_k, self.scale = experts, shared, top_k, scale
        self.weight = nn.Parameter(torch.empty(experts + shared, hidden))
        self.factor = nn.Parameter(torch.empty(1))
        self.selection_bias: Tensor
        self.register_buffer("selection_bias", torch.empty(experts, dtype=torch.float32))

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)
        nn.init.ones_(self.factor)
        nn.init.zeros_(self.selection_bias)

    def forward(self, x: Tensor, context: Context | None = None) -> tuple[Tensor, Tensor]:
        logits = linear(x.to(torch.promote_types(x.dtype, torch.float32)), self.weight)
        routed, shared = logits.split((self.experts, self.shared), -1)
        index = torch.topk(routed.sigmoid() + self.selection_bias, self.top_k, dim=-1).indices
        # In logarithms: saturated sigmoids would divide 0 by 0.
        scores = F.logsigmoid(torch.cat((routed.gather(-1, index), shared), -1))
        weights = torch.exp(scores - torch.logsumexp(scores, -1, keepdim=True))
        return weights * self.scale * self.factor.to(weights.dtype), index
