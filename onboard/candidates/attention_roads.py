"""What makes the queries and keys of softmax attention: a projection, a short convolution, a clamp, a norm, a rotation.

Each way is tried against what the module really fed to its softmax.
"""

from collections.abc import Iterator
from functools import cached_property
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from dayzero.onboard.candidates.attention_pieces import Norm, Piece, Road, distinct_norms
from dayzero.onboard.candidates.attention_scores import ScoresSolver
from dayzero.onboard.candidates.equality import close, distinct_heads, multiple
from dayzero.onboard.candidates.evidence import Evidence, Site
from dayzero.onboard.candidates.softmax import SoftmaxSeen
from dayzero.onboard.oracle.calls import Call, same
from dayzero.runtime.nn.rotary import rotate


class RoadsSolver(ScoresSolver):
    """linears: every projection below the module. end: the last one, whose output is the module's."""

    def __init__(self, site: Site, linears: dict[str, Call], end: str, seen: SoftmaxSeen):
        super().__init__(site, seen)
        self.linears, self.end = linears, end
        self.query, self.attended = (part.transpose(1, 2) for part in (seen.query, seen.attended))
        self.heads, self.head_dim = self.query.shape[2:]
        self.value_dim = self.attended.shape[-1]
        self.kv_heads = max(distinct_heads(seen.key), distinct_heads(seen.value))
        step = self.heads // self.kv_heads
        self.key, self.value = (part.transpose(1, 2)[:, :, ::step] for part in (seen.key, seen.value))
        self.before: dict[Road, Tensor] = {}  # queries or keys as they are before they are turned
        self.mixes = dict(self._convolutions())
        self.inputs = [path for path, call in linears.items() if same(call.hidden, site.call.hidden)]

    def _convolutions(self) -> Iterator[tuple[str, tuple[str, Tensor]]]:
        """For each projection whose output goes through a short causal convolution with a residual: the weight of it,
        and what it gives."""
        for path, call in self.site.inner.items():
            weights = [(name, p) for name, p in call.module.named_parameters() if p.ndim == 3 and p.shape[1] == 1]
            if len(weights) != 1 or not call.has_stream or call.hidden.ndim != 3 or call.result.ndim != 3:
                continue
            name, weight = weights[0]
            before = F.pad(call.hidden.transpose(1, 2), (weight.shape[-1] - 1, 0))
            if weight.shape[0] != call.hidden.shape[-1]:
                continue
            mixed = F.conv1d(before, weight.detach(), groups=weight.shape[0]).transpose(1, 2)
            if close(call.hidden + mixed, call.result):
                for linear, made in self.linears.items():
                    if same(made.result, call.hidden):
                        yield linear, (f"{path}.{name}", call.result)

    def _result(self, piece: Piece) -> Tensor:
        """A piece of a projection's output, after the convolution that it may go through."""
        mixed = self.mixes.get(piece.path)
        return piece.of(self.linears[piece.path].result if mixed is None else mixed[1])

    def _pieces(self, rows: int) -> Iterator[Piece]:
        """Projections of the input, or parts of them, with so many rows."""
        unit = min(self.head_dim, self.value_dim)
        for path in self.inputs:
            total = self.linears[path].result.shape[-1]
            if total == rows:
                yield Piece(path, 0, rows, 1, whole=True)
            for groups in dict.fromkeys((1, self.kv_heads, self.heads)):
                if total <= rows or total % groups or rows % groups:
                    continue
                width = rows // groups
                for start in range(0, total // groups - width + 1, unit):
                    yield Piece(path, start, start + width, groups, whole=False)

    def _roads(self, target: Tensor, positions: bool) -> Iterator[tuple[Road, Tensor]]:
        """Ways to `target` [B, S, heads, D], each with what it still has to be multiplied by: [B, S], or [1, 1]."""
        heads, dim = target.shape[2:]
        settled: set[tuple[Piece, Norm | None]] = set()
        for piece in self._pieces(heads * dim):
            raw = self._result(piece)
            for kind, norm, after, clip in self._norms_for(heads, dim):
                start = raw
                if kind == "whole" and norm is not None:
                    start = norm.of(self.site.module, start)
                if clip is not None:
                    bound = clip.resolve(self.site.module, self.site.config)
                    start = start.clamp(-bound, bound)
                start = start.unflatten(-1, (heads, dim))
                if after and norm is not None and norm.weight is None and (piece, norm) in settled:
                    continue  # without a weight it is the same before and after
                if kind == "head" and norm is not None and not after:
                    start = norm.of(self.site.module, start)
                for style, last, table in self._rotations(dim):
                    if style is None and after:
                        continue
                    turned = start if style is None else self._turned(start, style, last, table)
                    if kind == "head" and norm is not None and after:
                        turned = norm.of(self.site.module, turned)
                    grown = multiple(turned, target, by_position=positions)
                    if grown is not None:
                        road = Road(piece, kind, norm, after, style, last, table, clip)
                        self.before[road] = start
                        settled.add((piece, norm))
                        yield road, grown
                        if style is None:  # a rotation by nothing is none
                            break

    def _rotations(self, dim: int) -> Iterator[tuple[str | None, bool, int]]:
        yield None, False, 0
        for table, (cos, _) in enumerate(self.site.context.tables):
            if 2 * cos.shape[-1] <= dim:
                for style in ("half", "interleaved"):
                    yield style, False, table
                    if 2 * cos.shape[-1] < dim:
                        yield style, True, table

    def _turned(self, x: Tensor, style: Any, last: bool, table: int) -> Tensor:
        cos, sin = self.site.context.tables[table]
        return rotate(x.flatten(0, 1), cos, sin, style, last).view(x.shape)

    def _norms_for(self, heads: int, dim: int) -> Iterator[tuple[str, Norm | None, bool, Evidence | None]]:
        """(kind, norm, whether after the rotation, clip): without a norm first."""
        for clip in self._clips:
            yield "none", None, False, clip
            for norm in self._norms(heads * dim):
                if heads > 1:
                    yield "whole", norm, False, clip
            for norm in self._norms(dim):
                yield "head", norm, False, clip
                if self.site.context.tables:
                    yield "head", norm, True, clip

    @cached_property
    def _clips(self) -> list[Evidence | None]:
        """Bounds of a clamp in the trace, and none: the clamp may be another one."""
        if "clamp" not in self.site.operations.steps:
            return [None]
        bounds = sorted(value for value in self.site.operations.constants if value > 0)
        return [*(evidence for value in bounds for evidence in self.site.explain(value)[:1]), None]

    def _norms(self, width: int) -> list[Norm]:
        """RMS norms below the module that take vectors of this width."""
        return [norm for norm in self._all_norms if self._fits(norm, width)]

    @cached_property
    def _all_norms(self) -> list[Norm]:
        return list(distinct_norms(self.site))

    def _fits(self, norm: Norm, width: int) -> bool:
        """Whether the norm takes vectors of this width; one without a weight takes any."""
        weight = norm.parameter(self.site.module)
        return weight is None or weight.shape[0] == width
