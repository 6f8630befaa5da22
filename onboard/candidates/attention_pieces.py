"""What a candidate for attention is put together from: projections, norms, ways to the softmax."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Evidence, Site, below, literal
from dayzero.onboard.oracle.calls import Call
from dayzero.runtime.weights import Part, Source, Stored


@dataclass(frozen=True)
class Piece:
    """Rows start .. stop-1 of each of `groups` blocks of a projection's rows; all of them where `whole`."""

    path: str
    start: int
    stop: int
    groups: int
    whole: bool

    def of(self, output: Tensor) -> Tensor:
        """The piece of a projection's output [B, S, R]."""
        if self.whole:
            return output
        return output.unflatten(-1, (self.groups, -1))[..., self.start : self.stop].flatten(-2)

    def source(self, kind: str) -> Source:
        """The expression for the piece of the projection's weight or bias."""
        stored = Stored(f"{self.path}.{kind}")
        return stored if self.whole else Part(0, self.start, self.stop, stored, self.groups)


@dataclass(frozen=True)
class Norm:
    """An RMS norm below the module: where, its weight (None without), its epsilon and offset."""

    path: str
    weight: str | None
    eps: Evidence
    epsilon: float
    offset: float

    def of(self, module: nn.Module, x: Tensor) -> Tensor:
        """The norm of x, with the weight that `module` holds."""
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon)
        weight = self.parameter(module)
        return y if weight is None else y * (self.offset + weight)

    def parameter(self, module: nn.Module) -> Tensor | None:
        return None if self.weight is None else module.get_parameter(f"{self.path}.{self.weight}").detach()


@dataclass(frozen=True)
class Road:
    """A way from a projection to what enters the softmax. kind: of the norm. growth: [B, S], what is multiplied."""

    piece: Piece
    kind: str
    norm: Norm | None
    after: bool
    style: str | None
    last: bool
    table: int
    clip: Evidence | None

    @property
    def manner(self) -> tuple:
        """What queries and keys must have in common."""
        clip = self.clip.label if self.clip is not None else None
        eps = None if self.norm is None else (self.norm.epsilon, self.norm.offset, self.norm.weight is None)
        return self.kind, eps, self.after, self.style, self.last, self.table, clip


def distinct_norms(site: Site) -> Iterator[Norm]:
    """Every norm below the module; of those without a weight one for each epsilon."""
    weightless = set()
    for path, call in site.inner.items():
        for norm in norms_of(path, call, site):
            if norm.weight is not None or norm.epsilon not in weightless:
                yield norm
            if norm.weight is None:
                weightless.add(norm.epsilon)


def norms_of(path: str, call: Call, site: Site) -> Iterator[Norm]:
    """The RMS norms that give exactly what the call gave; none for a module that is no norm."""
    parameters = list(call.module.named_parameters())
    if not call.has_stream or len(parameters) > 1 or (parameters and parameters[0][1].ndim != 1):
        return
    if any(True for _ in call.module.children()) or isinstance(call.module, nn.Embedding):
        return
    x, y = call.hidden, call.result
    if x.shape != y.shape or x.ndim < 3:
        return
    weight = parameters[0][1].detach() if parameters else None
    if weight is not None and weight.shape[0] != x.shape[-1]:
        return
    inner = Site(call, {}, site.config)
    for epsilon in sorted(value for value in inner.operations.constants if 0 < value < 0.1):
        plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + epsilon)
        for offset in (0.0, 1.0) if weight is not None else (0.0,):
            if torch.allclose(plain if weight is None else plain * (offset + weight), y, rtol=1e-12, atol=1e-14):
                known = (inner.explain(epsilon) or [literal(epsilon, "constant in the trace")])[0]
                yield Norm(path, parameters[0][0] if parameters else None, below(path, known), epsilon, offset)
