"""A module with routed experts taken apart by what flows inside it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Candidate, Site, below
from dayzero.onboard.candidates.expert_banks import Bank
from dayzero.onboard.candidates.feed_forward import propose_feed_forward
from dayzero.onboard.candidates.nesting import site_below
from dayzero.onboard.candidates.norm import propose_norm
from dayzero.onboard.oracle.calls import Call, tensors
from dayzero.onboard.oracle.reference import state_of

TOLERANCE = 1e-9


@dataclass
class Parts:
    """The module taken apart around its routed experts."""

    site: Site
    bank: Bank

    @property
    def stream(self) -> Tensor:
        """[T, H]"""
        hidden = self.site.call.hidden
        return hidden.reshape(-1, hidden.shape[-1])

    @cached_property
    def container(self) -> Call | None:
        return self.site.inner.get(self.bank.owner) if self.bank.owner else self.site.call

    @cached_property
    def index(self) -> Tensor | None:
        """[T, K] int64: the experts that the container was told."""
        call = self.container
        if call is None:
            return None
        found = [t for t in tensors((call.args, call.kwargs)) if t.dtype == torch.int64 and t.ndim >= 2]
        fits = [t for t in found if t.numel() % self.stream.shape[0] == 0]
        whole = [t.reshape(self.stream.shape[0], -1) for t in fits]
        # A mask over experts is no list of them.
        return whole[0] if len(whole) == 1 and not (whole[0].shape[1] > 1 and int(whole[0].sum(1).max()) <= 1) else None

    @cached_property
    def weights(self) -> Tensor | None:
        """[T, K]: the weights that the container was told."""
        if self.index is None or self.container is None:
            return None
        held = [t for t in tensors((self.container.args, self.container.kwargs)) if t.is_floating_point()]
        found = [t for t in held[1:] if t.numel() == self.index.numel()]
        return found[0].reshape(self.index.shape) if len(found) == 1 else None

    @cached_property
    def expert_input(self) -> Tensor | None:
        """[T, width] that the container read, None where that is not one row a token."""
        if self.container is None:
            return None
        hidden = self.container.hidden.reshape(-1, self.container.hidden.shape[-1])
        return hidden if hidden.shape[0] == self.stream.shape[0] else None

    @cached_property
    def router_path(self) -> str:
        """The module whose output holds the index; the module itself where it routes in a method of its own."""
        if self.index is not None:
            for path, call in self.site.inner.items():
                inside = f"{path}.".startswith(f"{self.bank.owner}.") or f"{self.bank.owner}.".startswith(f"{path}.")
                if not inside and any(_equal(tensor, self.index) for tensor in tensors(call.output)):
                    return path
        return ""

    @cached_property
    def shared(self) -> dict[str, Candidate]:
        """Feed-forward layers on the stream, by path, outermost ones."""
        found: dict[str, Candidate] = {}
        for path, call in reversed(self.site.inner.items()):
            if self.is_of_bank_or_router(path) or any(path.startswith(f"{other}.") for other in found):
                continue
            if (
                call.has_stream
                and call.hidden.shape[-1] == self.stream.shape[1]
                and same_stream(call.hidden, self.stream)
            ):
                inner = site_below(self.site, path)
                fitting = (c for c in propose_feed_forward(inner) if reproduces(c, inner))
                if (best := next(fitting, None)) is not None:
                    found[path] = below(path, best)
        return found

    def is_of_bank_or_router(self, path: str) -> bool:
        owners = [self.bank.owner, *([self.router_path] if self.router_path else [])]
        return any(f"{path}.".startswith(f"{owner}.") for owner in owners)

    @cached_property
    def norms(self) -> dict[str, Candidate]:
        """Norms by path that are not the router's, the first candidate that gives the captured values."""
        found: dict[str, Candidate] = {}
        for path, call in self.site.inner.items():
            of_router = self.router_path and f"{path}.".startswith(f"{self.router_path}.")
            vectors = all(p.ndim == 1 for p in call.module.parameters()) and any(True for _ in call.module.parameters())
            if of_router or not vectors or not call.has_stream or isinstance(call.module, nn.Linear):
                continue
            inner = site_below(self.site, path)
            fitting = (c for c in propose_norm(inner) if reproduces(c, inner))
            if (best := next(fitting, None)) is not None:
                found[path] = below(path, best)
        return found

    @cached_property
    def free(self) -> dict[str, Tensor]:
        """Tensors that are not the experts', a shared layer's, a norm's or a projection's: those that may be the
        router's."""
        taken = set(self.bank.parameters)
        for candidate in [*self.shared.values(), *self.norms.values()]:
            taken |= {name for source in candidate.parameters.values() for name in source.names({})}
        return {
            name: tensor
            for name, tensor in state_of(self.site.module).items()
            if name not in taken and name.partition(".")[0] not in self.idle
        }

    @cached_property
    def idle(self) -> set[str]:
        """Children that did not run and whose parameters do not reach the output: other experts for other tokens."""
        quiet = {name for name, _ in self.site.module.named_children() if name not in self.site.inner}
        parameters = {
            n: p for n, p in self.site.module.named_parameters() if p.requires_grad and n.split(".")[0] in quiet
        }
        output = self.site.call.replay(self.site.call.hidden)
        if not parameters or not output.requires_grad:
            return quiet
        grads = torch.autograd.grad(output.sum(), list(parameters.values()), allow_unused=True)
        return quiet - {name.split(".")[0] for name, grad in zip(parameters, grads, strict=True) if grad is not None}


def _equal(tensor: Tensor, index: Tensor) -> bool:
    return (
        tensor.dtype == index.dtype
        and tensor.numel() == index.numel()
        and torch.equal(tensor.reshape(index.shape), index)
    )


def same_stream(value: Tensor, stream: Tensor) -> bool:
    return value.numel() == stream.numel() and torch.equal(value.reshape(stream.shape), stream)


def loaded(candidate: Candidate, site: Site) -> nn.Module | None:
    """The candidate as a block with the module's values, None where it cannot be built."""
    try:
        block = candidate.spec(site.module, site.config).build().to(torch.float64)
        values = candidate.values(state_of(site.module))
        block.load_state_dict(values, strict=True)
    except (ValueError, TypeError, AttributeError, IndexError, KeyError, RuntimeError):
        return None
    return block


def reproduces(candidate: Candidate, site: Site) -> bool:
    block = loaded(candidate, site)
    if block is None:
        return False
    with torch.no_grad():
        ours = block(site.call.hidden.reshape(-1, site.call.hidden.shape[-1]))
    # Not the captured result: the module above may have added to it in place.
    return close(ours, site.usual)


def close(ours: Tensor, theirs: Tensor) -> bool:
    if ours.numel() != theirs.numel():
        return False
    miss = torch.linalg.vector_norm(ours - theirs.reshape(ours.shape))
    return bool(miss <= TOLERANCE * torch.linalg.vector_norm(theirs))
