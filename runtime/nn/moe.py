"""A routed mixture of experts: route, permute, (exchange,) compute, combine; and what stands around the experts."""

from functools import partial
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from .capacity import padded
from .context import Context
from .experts import Experts
from .feed_forward import FeedForward, GatedFeedForward
from .layer_norm import LayerNorm
from .linear import reset_linear
from .norm import RMSNorm, ScaledFirstRMSNorm
from .permutation import Weigh, sorted_copies, through_experts
from .routed import Routed
from .router import Routing

Norm = RMSNorm | ScaledFirstRMSNorm | LayerNorm


class MixtureOfExperts(Routed):
    """x: [T, H] -> [T, H], the weighted sum over each token's top_k experts, and the shared feed-forward layer.

        z = latent_norm(into x)           where latent is given: the experts are that wide; else z = x
        r = sum_k w_k expert_norm(E_k z)  or E_k(w_k z) where weigh is "input"
        y = out_of(routed_norm(r)) + bias + s
        s = shared(x), times sigmoid(gate x) where shared_gate, weighed by the router where it weighs shared experts
        result = output_norm(y)           y / 2 where `average`: the mean of what is routed and what is shared

    spare: what the classes of the router beyond the experts give: nothing ("zero"), or their input ("identity").
    """

    lora_targets = ("into", "out_of")
    parallel_inner: ClassVar = ("router", "shared")  # all else looks at each token by itself

    def __init__(
        self,
        router: Routing,
        experts: Experts,
        shared: GatedFeedForward | FeedForward | None = None,
        shared_gate: bool = False,
        average: bool = False,
        weigh: Weigh = "output",
        spare: Literal["zero", "identity"] = "zero",
        hidden: int | None = None,
        latent_bias: bool = False,
        latent_norm: Norm | None = None,
        expert_norm: Norm | None = None,
        routed_norm: Norm | None = None,
        output_norm: Norm | None = None,
        bias: bool = False,
    ):
        """hidden: the width of the stream where it is not that of the experts: they are reached by projections."""
        super().__init__(router, experts)
        self.shared = shared
        self.average, self.weigh, self.spare = average, weigh, spare
        self.latent_norm, self.expert_norm = latent_norm, expert_norm
        self.routed_norm, self.output_norm = routed_norm, output_norm
        stream, width = hidden or experts.hidden, experts.hidden
        self.into = nn.Linear(stream, width, bias=latent_bias) if hidden is not None else None
        self.out_of = nn.Linear(width, stream, bias=latent_bias) if hidden is not None else None
        self.gate = nn.Linear(stream, 1, bias=False) if shared_gate else None
        self.bias = nn.Parameter(torch.empty(stream)) if bias else None

    @property
    def uses_context(self) -> bool:
        """Whether the router reads more than the hidden input."""
        return getattr(self.router, "uses_context", False) or getattr(self.router, "losses", None) is not None

    def reset_parameters(self, std: float) -> None:
        for linear in (self.into, self.out_of, self.gate):
            if linear is not None:
                reset_linear(linear, std)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def forward(self, x: Tensor, context: Context | None = None) -> Tensor:
        weights, index = self.router(x, context)
        weights, shared_weights = weights[:, : index.shape[1]], weights[:, index.shape[1] :]
        z = x if self.into is None else self.into(x)
        if self.latent_norm is not None:
            z = self.latent_norm(z)
        count = self.experts.experts
        self._count(index)

        # Tokens travel while the shared experts compute.
        limit, aimed = self._limited(index, weights)
        pad = limit if self.capacity is not None and self.capacity.pad else None
        journey = self.exchange.depart(z, weights, aimed, count, pad) if self.exchange is not None else None
        shared = None if self.shared is None else self._shared(x, shared_weights)
        how = {"weigh": self.weigh, "norm": self.expert_norm}
        if journey is not None:
            y = journey.arrive(self.experts(journey.take(), None, partial(journey.compute, **how)))
        else:
            total = index.numel() if self.router.experts == count and aimed is index else None
            experts = self.experts if pad is None else padded(self.experts, pad)
            y = through_experts(experts, z, weights, sorted_copies(aimed, count, total), **how)
        if self.spare == "identity":
            y = y + z * (weights * (index >= count)).sum(-1, keepdim=True).to(z.dtype)

        if self.routed_norm is not None:
            y = self.routed_norm(y)
        if self.out_of is not None:
            y = self.out_of(y)
        if self.bias is not None:
            y = y + self.bias
        if shared is not None:
            y = y + shared
        if self.average:
            y = y / 2
        return y if self.output_norm is None else self.output_norm(y)

    def _shared(self, x: Tensor, weights: Tensor) -> Tensor:
        assert self.shared is not None
        y = self.shared(x, weights) if weights.shape[1] else self.shared(x)
        return y if self.gate is None else torch.sigmoid(self.gate(x)) * y
