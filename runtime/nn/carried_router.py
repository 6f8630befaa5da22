"""A router with a small network of its own, whose state is carried from layer to layer."""

import torch
from torch import Tensor, nn

from .activation import Activation, activation
from .context import Context
from .linear import reset_linear
from .norm import RMSNorm
from .router import Routing

STATE = "router_state"  # its name in Context.shared: [T, width], of the last such router


class CarriedRouter(Routing):
    """state = down x (+ carry * the state of the router before); logits = out(act(second(act(first(norm(state)))))).

    Softmax over all classes; the selection is by softmax + selection_bias, a float32 buffer. carried: whether there is
    a router before. It leaves its own state in `context.shared`.
    """

    uses_context = True
    context_parallel = True
    parallel_rows = True  # looks at each token by itself

    def __init__(
        self, hidden: int, experts: int, top_k: int, width: int, eps: float, act: Activation, carried: bool = True
    ):
        super().__init__()
        self.experts, self.top_k = experts, top_k
        self.act: Activation = act
        self.down = nn.Linear(hidden, width)
        self.carry = nn.Parameter(torch.empty(width)) if carried else None
        self.norm = RMSNorm(width, eps)
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)
        self.out = nn.Linear(width, experts, bias=False)
        self.selection_bias: Tensor
        self.register_buffer("selection_bias", torch.empty(experts, dtype=torch.float32))

    def reset_parameters(self, std: float) -> None:
        for linear in (self.down, self.first, self.second, self.out):
            reset_linear(linear, std)
        if self.carry is not None:
            nn.init.ones_(self.carry)
        nn.init.zeros_(self.selection_bias)

    def forward(self, x: Tensor, context: Context | None = None) -> tuple[Tensor, Tensor]:
        if context is None:
            raise ValueError("this router reads and leaves a state, and was given no context")
        state = self.down(x)
        if self.carry is not None:
            if STATE not in context.shared:
                raise ValueError("this router adds the state of the one before it, and there was none")
            state = state + context.shared[STATE] * self.carry
        context.shared[STATE] = state
        act = activation(self.act)
        logits = self.out(act(self.second(act(self.first(self.norm(state))))))
        scores = logits.to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
        index = torch.topk(scores.detach() + self.selection_bias, self.top_k, dim=-1).indices
        return scores.gather(-1, index), index
