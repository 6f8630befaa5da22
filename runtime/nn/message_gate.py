"""Gates that let a message into the stream: how much of either stays is read off both."""

import torch
from torch import Tensor, nn

from .linear import reset_linear
from .norm import RMSNorm


class MessageGate(nn.Module):
    """y = (1 - tanh(forget c)) * x + tanh(take c) * message, with c = down [rms(x) ; rms(message)].

    x, message: [T, hidden] -> [T, hidden]; down: [rank, 2 hidden], forget and take: [hidden, rank]; the norms have no
    weights. Gates and sum in float32 at least.
    """

    parallel_rows = True  # looks at each token by itself

    def __init__(self, hidden: int, rank: int, eps: float):
        super().__init__()
        self.norm = RMSNorm(hidden, eps, scaled=False)
        self.down = nn.Linear(2 * hidden, rank, bias=False)
        self.forget = nn.Linear(rank, hidden, bias=False)
        self.take = nn.Linear(rank, hidden, bias=False)

    def reset_parameters(self, std: float) -> None:
        reset_linear(self.down, std)
        # Both gates closed: the stream passes as it is.
        nn.init.zeros_(self.forget.weight)
        nn.init.zeros_(self.take.weight)

    def forward(self, x: Tensor, message: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        both = torch.cat((self.norm(x.to(wide)), self.norm(message.to(wide))), -1)
        read = self.down(both.to(self.down.weight.dtype))
        forget, take = (gate(read).to(wide).tanh() for gate in (self.forget, self.take))
        return ((1 - forget) * x + take * message).to(x.dtype)
