"""Candidates for a router that is a part of its layer by itself: its experts are a sibling, not inside one module."""

from dataclasses import dataclass

import torch
from torch import Tensor

from dayzero.onboard.candidates.evidence import Candidate, Site
from dayzero.onboard.candidates.nesting import Inner
from dayzero.onboard.candidates.router import dense, propose_router
from dayzero.onboard.oracle.calls import Call, tensors
from dayzero.onboard.oracle.reference import state_of


@dataclass
class RoutingCall(Call):
    """The call of a router, whose result is the matrix [T, E] of the weights that it gives to experts."""

    experts: int = 0

    @property
    def result(self) -> Tensor:
        return _matrix(self.output, self.experts)

    def replay(self, hidden: Tensor) -> Tensor:
        swapped = self.arguments(lambda value: hidden if value is self.hidden else value)
        return _matrix(self.replay_exactly(*swapped), self.experts)


def routing_call(call: Call, experts: int) -> RoutingCall | None:
    """The call as one that gives weights, None where it gives no index and weights of one shape."""
    if _index_and_weights(call.output) is None:
        return None
    return RoutingCall(call.path, call.module, call.args, call.kwargs, call.output, experts=experts)


def _index_and_weights(output: object) -> tuple[Tensor, Tensor] | None:
    made = tensors(output)
    for index in made:
        for weights in made:
            if index.dtype == torch.int64 and weights.is_floating_point() and weights.shape == index.shape:
                return index, weights
    return None


def _matrix(output: object, experts: int) -> Tensor:
    found = _index_and_weights(output)
    if found is None:
        raise ValueError("the router gives no index and weights of one shape")
    return dense(*found, experts)


def propose_routing(site: Site) -> list[Candidate]:
    """`LeaveRouting` around the routers that the trace suggests. site: of a `RoutingCall`."""
    hidden = site.call.hidden.shape[-1]
    state = {name: tensor for name, tensor in state_of(site.module).items() if tensor.is_floating_point()}
    matrices = [name for name, tensor in state.items() if tensor.ndim == 2 and tensor.shape[1] == hidden]
    vectors = {name: tensor.numel() for name, tensor in state.items() if tensor.numel() == max(tensor.shape, default=0)}
    routers = [router for matrix in matrices for router in propose_router(Inner(site, ""), matrix, vectors, hidden)]
    return [Candidate("LeaveRouting", {"router": router}, {}) for router in routers]
