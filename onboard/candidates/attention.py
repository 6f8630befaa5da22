"""Candidates for softmax attention, solved in pieces: what makes queries and keys, what makes values, what becomes of
the weighted sums, and what stands between the products and the softmax.

Each piece is matched against what the module really fed to its softmax (`softmax.py`), so that few candidates are left.
"""

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import (
    Candidate,
    Evidence,
    Site,
    below,
    literal,
    present,
    size,
)
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.softmax import SoftmaxSeen, watch
from dayzero.onboard.discover import Call, same
from dayzero.runtime.nn.attention import _GATES
from dayzero.runtime.nn.rotary import rotate
from dayzero.runtime.weights import Part, Source, Squeeze, Stored

CLOSE = 1e-9  # relative: two ways to the same values
_MASKED = -1e30


def propose_attention(site: Site) -> list[Candidate]:
    """Grouped-query attention with every norm, rotation, gate, sink and mask that the captured values allow."""
    linears = {path: call for path, call in linear_calls(site).items() if call.hidden.ndim == 3}
    ends = [path for path, call in linears.items() if same(call.result, site.call.result)]
    if not ends or site.call.hidden.ndim != 3:
        return []
    candidates: list[Candidate] = []
    for seen in watch(site.call):
        candidates += _Solver(site, linears, ends[-1], seen).candidates()
    return candidates


@dataclass(frozen=True)
class _Piece:
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
class _Norm:
    """An RMS norm below the module: where, its weight (None without), its epsilon and offset."""

    path: str
    weight: str | None
    eps: Evidence
    epsilon: float
    offset: float


@dataclass(frozen=True)
class _Road:
    """A way from a projection to what enters the softmax. kind: of the norm. growth: [B, S], what is multiplied."""

    piece: _Piece
    kind: str
    norm: _Norm | None
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


class _Solver:
    def __init__(self, site: Site, linears: dict[str, Call], end: str, seen: SoftmaxSeen):
        self.site, self.linears, self.end, self.seen = site, linears, end, seen
        self.query, self.attended = (part.transpose(1, 2) for part in (seen.query, seen.attended))
        self.heads, self.head_dim = self.query.shape[2:]
        self.value_dim = self.attended.shape[-1]
        self.kv_heads = max(_distinct_heads(seen.key), _distinct_heads(seen.value))
        step = self.heads // self.kv_heads
        self.key, self.value = (part.transpose(1, 2)[:, :, ::step] for part in (seen.key, seen.value))
        self.before: dict[_Road, Tensor] = {}  # queries or keys as they are before they are turned
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
            if _close(call.hidden + mixed, call.result):
                for linear, made in self.linears.items():
                    if same(made.result, call.hidden):
                        yield linear, (f"{path}.{name}", call.result)

    def _result(self, piece: _Piece) -> Tensor:
        """A piece of a projection's output, after the convolution that it may go through."""
        mixed = self.mixes.get(piece.path)
        return piece.of(self.linears[piece.path].result if mixed is None else mixed[1])

    # --- all together -----------------------------------------------------------------------------------------------

    def candidates(self) -> Iterator[Candidate]:
        wide = self.linears[self.end].hidden.shape[-1]
        if self.key.shape[1] != self.query.shape[1] or wide != self.heads * self.value_dim:
            return
        visible = self._visibility()
        scores = self._scores()
        if visible is None or scores is None:
            return
        queries = list(self._roads(self.query, positions=True))
        keys = list(self._roads(self.key, positions=False)) if queries else []
        values = list(self._values()) if keys else []
        outputs = list(self._outputs()) if values else []
        sinks = self._sinks()
        if sinks is None:
            return
        pairs = [(q, k) for q, k in itertools.product(queries, keys) if q[0].manner == k[0].manner]
        for (query, grown), (key, ratio) in pairs:
            key_factors = self._factor("key", float(ratio.flatten()[0]), self.before[key])
            query_arguments = list(self._query_factors(query, grown, scores))
            for value, output in itertools.product(values, outputs):
                made = self._shared_arguments(query, key) | value[0] | sinks[0] | output[0]
                parameters = self._query_key_parameters(query, key) | value[1] | sinks[1] | output[1]
                value_factors = self._factor("value", value[2], self.value)
                for pieces in itertools.product(query_arguments, key_factors, value_factors, visible):
                    arguments: dict[str, Evidence | Candidate] = {**made}
                    for piece in pieces:
                        arguments |= piece
                    yield Candidate("GroupedQueryAttention", arguments, parameters)

    def _query_key_parameters(self, query: _Road, key: _Road) -> dict[str, Source]:
        parameters = {**self._projection("query", query.piece), **self._projection("key", key.piece)}
        for ours, road in (("query_norm", query), ("key_norm", key)):
            if road.norm is not None and road.norm.weight is not None:
                parameters[f"{ours}.weight"] = Stored(f"{road.norm.path}.{road.norm.weight}")
        return parameters

    def _shared_arguments(self, query: _Road, key: _Road) -> dict[str, Evidence]:
        arguments: dict[str, Evidence] = {
            "hidden": size(f"{query.piece.path}.weight", 1),
            "heads": self._heads(),
            "kv_heads": self._kv_heads(key.piece),
            "head_dim": self._head_dim(query),
            "rotary": literal(query.style, "what the softmax was given"),
        }
        if self.linears[self.end].result.shape[-1] != self.site.call.hidden.shape[-1]:
            arguments["out"] = size(f"{self.end}.weight", 0)
        if query.style is not None and query.table:
            arguments["table"] = literal(query.table, "the tables that the softmax's input shows")
        if query.last:
            arguments["rotary_last"] = literal(True, "what the softmax was given")
        if self.value_dim != self.head_dim:
            arguments["value_dim"] = self._value_dim()
        if (mixed := self.mixes.get(key.piece.path)) is not None:
            arguments["convolution"] = size(mixed[0], 2)
        if query.clip is not None:
            arguments["clip"] = query.clip
        if query.norm is not None:
            arguments["qk_norm"] = literal(query.kind, "the norms' width")
            arguments["qk_norm_eps"] = query.norm.eps
            arguments["qk_norm_offset"] = literal(query.norm.offset, "enumerated")
            if query.norm.weight is None:
                arguments["qk_norm_scaled"] = literal(False, "the norm has no weight")
            if query.after:
                arguments["qk_norm_after_rotary"] = literal(True, "what the softmax was given")
        arguments["bias"] = present(f"{query.piece.path}.bias")
        arguments["output_bias"] = present(f"{self.end}.bias")
        return arguments

    def _projection(self, ours: str, piece: _Piece) -> dict[str, Source]:
        module = self.linears[piece.path].module
        kinds = ("weight",) if module.bias is None else ("weight", "bias")
        made = {f"{ours}.{kind}": piece.source(kind) for kind in kinds}
        if (mixed := self.mixes.get(piece.path)) is not None:
            made[f"{ours}_mix"] = Squeeze((1,), Stored(mixed[0]))
        return made

    # --- sizes ------------------------------------------------------------------------------------------------------

    def _head_dim(self, query: _Road) -> Evidence:
        if query.kind == "head" and query.norm is not None and query.norm.weight is not None:
            return size(f"{query.norm.path}.{query.norm.weight}", 0)
        return self._named(self.head_dim, ("head_dim", "dim", "size")) or _divided(
            size(f"{self.end}.weight", 1), self._named(self.heads, ("heads",)) or literal(self.heads, "the softmax")
        )

    def _heads(self) -> Evidence:
        if self.value_dim == self.head_dim and (dim := self._named(self.head_dim, ("head_dim", "dim", "size"))):
            return _divided(size(f"{self.end}.weight", 1), dim)
        return self._named(self.heads, ("heads",)) or literal(self.heads, "the softmax's input")

    def _kv_heads(self, key: _Piece) -> Evidence:
        dim = self._named(self.head_dim, ("head_dim", "dim", "size"))
        if key.whole and dim is not None:
            return _divided(size(f"{key.path}.weight", 0), dim)
        named = self._named(self.kv_heads, ("key_value", "kv", "heads"))
        return named or literal(self.kv_heads, "heads that differ in the softmax's input")

    def _value_dim(self) -> Evidence:
        return self._named(self.value_dim, ("v_head", "value", "dim")) or literal(
            self.value_dim, "the softmax's output"
        )

    def _named(self, value: int, words: tuple[str, ...]) -> Evidence | None:
        """An attribute or field with this value, the module's own first, and those with one of the words before."""
        found = self._held(value, int)
        found.sort(key=lambda evidence: _rank(evidence, words))
        return found[0] if found else None

    def _held(self, value: float, kind: type) -> list[Evidence]:
        """Every attribute and field that holds this value and can be read by itself."""
        found = []
        for evidence in self.site.explain(value):
            with contextlib.suppress(Exception):  # a config may refuse to say what differs from layer to layer
                if type(evidence.resolve(self.site.module, self.site.config)) is kind:
                    found.append(evidence)
        return found

    # --- queries and keys -------------------------------------------------------------------------------------------

    def _pieces(self, rows: int) -> Iterator[_Piece]:
        """Projections of the input, or parts of them, with so many rows."""
        unit = min(self.head_dim, self.value_dim)
        for path in self.inputs:
            total = self.linears[path].result.shape[-1]
            if total == rows:
                yield _Piece(path, 0, rows, 1, whole=True)
            for groups in dict.fromkeys((1, self.kv_heads, self.heads)):
                if total <= rows or total % groups or rows % groups:
                    continue
                width = rows // groups
                for start in range(0, total // groups - width + 1, unit):
                    yield _Piece(path, start, start + width, groups, whole=False)

    def _roads(self, target: Tensor, positions: bool) -> Iterator[tuple[_Road, Tensor]]:
        """Ways to `target` [B, S, heads, D], each with what it still has to be multiplied by: [B, S], or [1, 1]."""
        heads, dim = target.shape[2:]
        settled: set[tuple[_Piece, _Norm | None]] = set()
        for piece in self._pieces(heads * dim):
            raw = self._result(piece)
            for kind, norm, after, clip in self._norms_for(heads, dim):
                start = raw
                if kind == "whole" and norm is not None:
                    start = self._apply(norm, start)
                if clip is not None:
                    bound = clip.resolve(self.site.module, self.site.config)
                    start = start.clamp(-bound, bound)
                start = start.unflatten(-1, (heads, dim))
                if after and norm is not None and norm.weight is None and (piece, norm) in settled:
                    continue  # without a weight it is the same before and after
                if kind == "head" and norm is not None and not after:
                    start = self._apply(norm, start)
                for style, last, table in self._rotations(dim):
                    if style is None and after:
                        continue
                    turned = start if style is None else self._turned(start, style, last, table)
                    if kind == "head" and norm is not None and after:
                        turned = self._apply(norm, turned)
                    grown = _multiple(turned, target, by_position=positions)
                    if grown is not None:
                        road = _Road(piece, kind, norm, after, style, last, table, clip)
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

    def _norms_for(self, heads: int, dim: int) -> Iterator[tuple[str, _Norm | None, bool, Evidence | None]]:
        """(kind, norm, whether after the rotation, clip): without a norm first."""
        for clip in self._clips():
            yield "none", None, False, clip
            for norm in self._norms(heads * dim):
                if heads > 1:
                    yield "whole", norm, False, clip
            for norm in self._norms(dim):
                yield "head", norm, False, clip
                if self.site.context.tables:
                    yield "head", norm, True, clip

    def _clips(self) -> list[Evidence | None]:
        """Bounds of a clamp in the trace, and none: the clamp may be another one."""
        if "clamp" not in self.site.operations.steps:
            return [None]
        bounds = sorted(value for value in self.site.operations.constants if value > 0)
        return [*(evidence for value in bounds for evidence in self.site.explain(value)[:1]), None]

    def _norms(self, width: int) -> list[_Norm]:
        """RMS norms below the module that take vectors of this width."""
        return [norm for norm in self._all_norms if self._width(norm) in {width, None}]

    @cached_property
    def _all_norms(self) -> list[_Norm]:
        return list(_distinct_norms(self.site))

    def _width(self, norm: _Norm) -> int | None:
        """The norm's width, None for one without a weight that takes any."""
        if norm.weight is None:
            return None
        return self.site.module.get_parameter(f"{norm.path}.{norm.weight}").shape[0]

    def _apply(self, norm: _Norm, x: Tensor) -> Tensor:
        y = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.epsilon)
        if norm.weight is None:
            return y
        return y * (norm.offset + self.site.module.get_parameter(f"{norm.path}.{norm.weight}").detach())

    # --- factors ----------------------------------------------------------------------------------------------------

    def _factor(self, part: str, ratio: float, made: Tensor) -> list[dict[str, Evidence]]:
        """The argument for a constant factor of `made`, [B, S, heads, D]; for one of 1, where the module is seen to
        multiply by it."""
        if abs(ratio - 1.0) > CLOSE:
            exact = self._constant(ratio)
            return [{f"{part}_factor": self._number(exact, (part, part[0] + "_", "mult"))}] if exact is not None else []
        if not self._multiplied_by_one(made):
            return [{}]
        ones = sorted(self._floats_that_are(1.0), key=lambda evidence: _rank(evidence, (part, part[0] + "_")))
        return [{f"{part}_factor": one} for one in ones[:1]] or [{}]

    def _multiplied_by_one(self, made: Tensor) -> bool:
        """Whether the module multiplied exactly these values, heads before or after positions, by a scalar 1."""
        forms = (made, made.transpose(1, 2))
        return any(
            form.numel() == found.numel()
            and form.shape[-1] == found.shape[-1]
            and torch.equal(form.reshape(-1), found.reshape(-1))
            for form in forms
            for found in self.seen.multiplied_by_one
        )

    def _floats_that_are(self, value: float) -> list[Evidence]:
        """The module's own attributes with this value, and the fields of the config."""
        return self._held(value, float)

    def _constant(self, value: float) -> float | None:
        """The constant of the trace that this measured value is."""
        near = [c for c in self.site.operations.constants if abs(c - value) <= 1e-7 * abs(value)]
        return min(near, key=lambda c: abs(c - value)) if near else None

    def _number(self, value: float, words: tuple[str, ...]) -> Evidence:
        """Where a constant is held; the head size's powers where nothing holds it."""
        found = [*self._floats_that_are(value)]
        found.sort(key=lambda evidence: _rank(evidence, words))
        dim = self._named(self.head_dim, ("head_dim", "dim", "size"))
        if dim is not None:
            powers = {
                "** -0.5": lambda d: d**-0.5,
                "** -1": lambda d: 1.0 / d,
                "/ 2, ** -0.5": lambda d: (d / 2) ** -0.5,
            }
            for shown, power in powers.items():
                if power(self.head_dim) == value:
                    found.append(
                        Evidence(
                            f"head size {shown}",
                            lambda module, config, power=power, dim=dim: power(dim.resolve(module, config)),
                        )
                    )
        for name, held in sorted(self.site.config.to_dict().items()):
            if isinstance(held, (int, float)) and not isinstance(held, bool) and held > 0 and held**-0.5 == value:
                found.append(
                    Evidence(f"config {name} ** -0.5", lambda module, config, name=name: getattr(config, name) ** -0.5)
                )
        return found[0] if found else literal(value, "constant in the trace")

    def _query_factors(
        self, query: _Road, grown: Tensor, scores: tuple[float, float | None, Evidence | None]
    ) -> Iterator[dict[str, Evidence]]:
        """Arguments about what multiplies queries and scores."""
        ratio, _, softcap = scores
        capped = {} if softcap is None else {"softcap": softcap}
        for arguments, rest in self._growths(grown):
            both = rest * ratio
            if abs(rest - 1.0) <= CLOSE or abs(ratio - 1.0) <= CLOSE:
                # One factor, wherever it stands: on queries or on scores.
                exact = 1.0 if abs(both - 1.0) <= CLOSE else self._constant(both)
                if exact is None:
                    continue
                scale = self._scale_of_one() if exact == 1.0 else self._number(exact, ("scal",))
                for factor in self._factor("query", 1.0, self.before[query]):
                    yield {**arguments, **factor, "scale": scale, **capped}
            else:
                inner, outer = self._constant(rest), self._constant(ratio)
                if inner is not None and outer is not None:
                    factor = {"query_factor": self._number(inner, ("query", "q_", "qk", "scale"))}
                    yield {**arguments, **factor, "scale": self._number(outer, ("scal",)), **capped}

    def _scale_of_one(self) -> Evidence:
        """A scale of 1: an attribute where scores or queries are multiplied by it."""
        ones = self._floats_that_are(1.0)
        if ones and any(found.numel() == self.seen.products.numel() for found in self.seen.multiplied_by_one):
            ones.sort(key=lambda evidence: _rank(evidence, ("scal",)))
            return ones[0]
        return literal(1.0, "the scores are the products")

    def _growths(self, grown: Tensor) -> Iterator[tuple[dict[str, Evidence], float]]:
        """Ways to explain the factor [B, S] of queries by their position: arguments, and the constant that is left."""
        first = float(grown.flatten()[0])
        constant = bool((grown - first).abs().max() <= CLOSE * abs(first))
        steps = self.site.operations.steps
        kinds = [("step_log", "log1p"), ("log", "log")]
        logs = [kind for kind, step in kinds if step in steps and (kind == "log" or "floor" in steps)]
        if "query_scale" in self.site.context.shared:
            left = grown.flatten() / self.site.context.shared["query_scale"]
            if bool((left - left[0]).abs().max() <= CLOSE * left[0].abs()):
                yield {"query_scale": literal("handed", "an argument of the module")}, float(left[0])
        for kind in logs:
            yield from self._logarithms(kind, grown)
        if constant:
            yield {}, first

    def _logarithms(self, kind: str, grown: Tensor) -> Iterator[tuple[dict[str, Evidence], float]]:
        seen = torch.arange(1, grown.shape[-1] + 1, dtype=torch.float64)
        constants = sorted(value for value in self.site.operations.constants if value > 0)
        for length, factor in itertools.permutations(constants, 2):
            ratio = seen / length
            shape = torch.log1p(torch.floor(ratio)) if kind == "step_log" else torch.log(ratio.clamp(min=1.0))
            if length < 1 or not bool((1 + factor * shape > 0).all()):
                continue
            left = grown / (1 + factor * shape)
            if bool((left - left[0, 0]).abs().max() <= CLOSE * left[0, 0].abs()):
                arguments = {
                    "query_scale": literal(kind, "the trace's logarithm"),
                    "query_scale_factor": _as_float(self._any_number(factor, ("scale", "alpha", "beta"))),
                    "query_scale_length": _as_float(self._any_number(length, ("floor", "length", "scale"))),
                }
                yield arguments, float(left[0, 0])

    def _any_number(self, value: float, words: tuple[str, ...]) -> Evidence:
        found = [*self._held(value, float), *self._held(value, int)]
        found.sort(key=lambda evidence: _rank(evidence, words))
        return found[0] if found else literal(value, "constant in the trace")

    # --- scores -----------------------------------------------------------------------------------------------------

    def _seen_keys(self) -> Tensor:
        """[B, N, S, U] bool."""
        return self.seen.scores[..., : self.seen.key.shape[2]] > _MASKED

    def _given_scores(self) -> Tensor:
        """[B, N, S, U]: what the softmax was given for the keys."""
        return self.seen.scores[..., : self.seen.key.shape[2]]

    def _scores(self) -> tuple[float, float | None, Evidence | None] | None:
        """(factor between products and scores, softcap, where it is held); None for scores that are more than that.

        A row may be shifted as a whole, which a softmax does not see: scores are compared with the diagonal's.
        """
        products, scores = self.seen.products, self._given_scores()
        keep = self._seen_keys()
        if not bool(torch.diagonal(keep, dim1=-2, dim2=-1).all()):
            return None
        ratio = _shifted_ratio(products, scores, keep)
        if ratio is not None:
            return ratio, None, None
        if "tanh" not in self.site.operations.steps:
            return None
        constants = sorted(self.site.operations.constants)
        for cap in (value for value in constants if value > 1):
            for ratio in (1.0, *(value for value in constants if 0 < value < 1)):
                found = _shifted_ratio(cap * torch.tanh(products * ratio / cap), scores, keep)
                if found is not None and abs(found - 1.0) <= CLOSE:
                    return ratio, cap, _as_float(self._any_number(cap, ("cap",)))
        return None

    def _visibility(self) -> list[dict[str, Evidence]] | None:
        """What the mask shows; None where it is no function of the distance alone."""
        seen = self._seen_keys()
        mask = seen[0, 0]
        if mask.shape[0] != mask.shape[1] or not bool((seen == mask).all()):
            return None
        at = torch.arange(mask.shape[0])
        age = at[:, None] - at
        if bool(mask.all()) and mask.shape[0] > 1:
            return [{"causal": literal(False, "the mask hides nothing")}]
        if torch.equal(mask, age >= 0):
            return [{}]
        widest = int(mask.sum(-1).max())
        for kind, shown in (("window", age < widest), ("chunk", at[:, None] // widest == at // widest)):
            if torch.equal(mask, (age >= 0) & shown):
                return [{kind: evidence} for evidence in self._extents(widest, kind)[:1]]
        return None

    def _extents(self, widest: int, kind: str) -> list[Evidence]:
        """Attributes and fields of this value; fields of one less, which do not count the token itself."""
        found = self._held(widest, int)
        found.sort(key=lambda evidence: _rank(evidence, (kind,)))
        less = [e for e in self._held(widest - 1, int) if kind in e.label]
        found += [
            Evidence(
                f"{e.label} + 1",
                lambda module, config, e=e: None if (held := e.resolve(module, config)) is None else held + 1,
            )
            for e in less
        ]
        return found or [literal(widest, "the mask's band")]

    def _sinks(self) -> tuple[dict[str, Evidence], dict[str, Source]] | None:
        """The parameter that is the softmax's last column; nothing without one, None for another kind of column."""
        columns = self.seen.scores.shape[-1] - self.seen.key.shape[2]
        if not columns:
            return {}, {}
        for name, parameter in self.site.module.named_parameters(recurse=False):
            if parameter.shape != (self.heads,):
                continue
            # The row's shift is known from its diagonal, once the scores' factor is.
            scores, factor = self.seen.scores, self._scores()
            if factor is None:
                continue
            products = self.seen.products * factor[0]
            if factor[1] is not None:
                products = factor[1] * torch.tanh(products / factor[1])
            shift = torch.diagonal(scores[..., :-1], dim1=-2, dim2=-1) - torch.diagonal(products, dim1=-2, dim2=-1)
            if _close(scores[..., -1] - shift, parameter.detach()[None, :, None].expand_as(shift)):
                return {"sinks": literal(True, "the softmax's last column")}, {"sinks": Stored(name)}
        return None

    # --- values and outputs -----------------------------------------------------------------------------------------

    def _values(self) -> Iterator[tuple[dict[str, Evidence], dict[str, Source], float]]:
        """(arguments, parameters, factor)."""
        heads, dim = self.value.shape[2:]
        keys = {road.piece for road, _ in self._roads(self.key, positions=False)}
        norms = [None, *(norm for norm in self._norms(dim) if norm.weight is None)]
        for piece, norm in itertools.product(self._pieces(heads * dim), norms):
            start = self._result(piece)
            for clip in self._clips():
                bound = None if clip is None else clip.resolve(self.site.module, self.site.config)
                value = (start if bound is None else start.clamp(-bound, bound)).unflatten(-1, (heads, dim))
                if norm is not None:
                    value = self._apply(norm, value)
                ratio = _multiple(value, self.value, by_position=False)
                if ratio is None:
                    continue
                arguments = {} if norm is None else {"value_norm_eps": norm.eps}
                if piece in keys:
                    arguments["value_is_key"] = literal(True, "one projection makes both")
                parameters = {} if piece in keys else self._projection("value", piece)
                yield arguments, parameters, float(ratio.flatten()[0])
                break

    def _outputs(self) -> Iterator[tuple[dict[str, Evidence], dict[str, Source]]]:
        """From what the heads have gathered to the last projection's input: a norm, a gate."""
        wanted = self.linears[self.end].hidden.unflatten(-1, (self.heads, self.value_dim))
        kinds = ("weight",) if self.linears[self.end].module.bias is None else ("weight", "bias")
        last: dict[str, Source] = {f"output.{kind}": Stored(f"{self.end}.{kind}") for kind in kinds}
        norms = [None, *(norm for norm in self._norms(self.value_dim) if norm.weight is None)]
        for norm in norms:
            start = self.attended if norm is None else self._apply(norm, self.attended)
            arguments = {} if norm is None else {"output_norm_eps": norm.eps}
            if _close(start, wanted):
                yield arguments, last
                return
            for gated, parameters in self._gates(start, wanted):
                yield {**arguments, **gated}, {**last, **parameters}
            for name, left in self._left_by_sinks():
                if _close(start * left, wanted):
                    yield {"sinks": literal(True, "a factor of the rows"), **arguments}, {"sinks": Stored(name), **last}

    def _left_by_sinks(self) -> Iterator[tuple[str, Tensor]]:
        """For each parameter that could be sinks, what they would leave of the rows' weights: [B, S, N, 1]."""
        if "logsumexp" in self.site.operations.steps:
            total = self.seen.scores.logsumexp(-1)[..., None].transpose(1, 2)
            for name, sinks in self._biases()[1:]:
                assert name is not None
                yield name, torch.sigmoid(total - sinks[:, None])  # type: ignore[operator]

    def _gates(self, start: Tensor, wanted: Tensor) -> Iterator[tuple[dict[str, Evidence], dict[str, Source]]]:
        for per_head, rows in ((False, self.heads * self.value_dim), (True, self.heads)):
            for piece in self._pieces(rows) if rows != self.heads else self._whole_pieces(rows):
                if self.linears[piece.path].module.bias is not None and piece.whole:
                    continue
                gate = piece.of(self.linears[piece.path].result).unflatten(-1, (self.heads, -1))
                for (name, bias), (act, function) in itertools.product(self._biases(), _GATES.items()):
                    shifted = gate if bias is None else gate + bias[:, None]
                    if _close(start * function(shifted), wanted):
                        arguments = {"gate": literal(act, "what the last projection was given")}
                        parameters: dict[str, Source] = {"gate.weight": piece.source("weight")}
                        if per_head:
                            arguments["gate_per_head"] = literal(True, "the projection's width")
                        if name is not None:
                            arguments["gate_bias"] = literal(True, "what the last projection was given")
                            parameters["gate_bias"] = Stored(name)
                        yield arguments, parameters

    def _whole_pieces(self, rows: int) -> Iterator[_Piece]:
        return (piece for piece in self._pieces(rows) if piece.whole)

    def _biases(self) -> list[tuple[str | None, Tensor | None]]:
        own = self.site.module.named_parameters(recurse=False)
        return [(None, None), *((name, p.detach()) for name, p in own if p.shape == (self.heads,))]


def _distinct_norms(site: Site) -> Iterator[_Norm]:
    """Every norm below the module; of those without a weight one for each epsilon."""
    weightless = set()
    for path, call in site.inner.items():
        for norm in _norms_of(path, call, site):
            if norm.weight is not None or norm.epsilon not in weightless:
                yield norm
            if norm.weight is None:
                weightless.add(norm.epsilon)


def _norms_of(path: str, call: Call, site: Site) -> Iterator[_Norm]:
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
                yield _Norm(path, parameters[0][0] if parameters else None, below(path, known), epsilon, offset)


def _rank(evidence: Evidence, words: tuple[str, ...]) -> tuple[int, int]:
    """Order only: the module's own attributes, then fields, then children's; those with an early word first."""
    label = evidence.label
    place = 0 if label.startswith("attribute ") and "." not in label else 1 if label.startswith("config ") else 2
    word = next((number for number, word in enumerate(words) if word in label), len(words))
    return word, place


def _divided(evidence: Evidence, divisor: Evidence) -> Evidence:
    return Evidence(
        f"{evidence.label} / {divisor.label}",
        lambda module, config: evidence.resolve(module, config) // divisor.resolve(module, config),
    )


def _as_float(evidence: Evidence) -> Evidence:
    return replace(evidence, resolve=lambda module, config: float(evidence.resolve(module, config)))


def _distinct_heads(part: Tensor) -> int:
    """How many groups of equal neighbours there are. part: [B, N, U, D]."""
    heads = part.shape[1]
    for groups in range(1, heads + 1):
        if heads % groups == 0:
            grouped = part.unflatten(1, (groups, -1))
            if bool((grouped == grouped[:, :, :1]).all()):
                return groups
    return heads


def _close(ours: Tensor, wanted: Tensor) -> bool:
    return ours.shape == wanted.shape and bool(
        torch.linalg.vector_norm(ours - wanted) <= CLOSE * torch.linalg.vector_norm(wanted)
    )


def _multiple(ours: Tensor, wanted: Tensor, by_position: bool) -> Tensor | None:
    """The factor that makes `ours` [B, S, heads, D] the wanted: [B, S] by position, else [1, 1]; None if none does."""
    dims = (2, 3) if by_position else (0, 1, 2, 3)
    size = ours.square().sum(dims, keepdim=True)
    factor = (ours * wanted).sum(dims, keepdim=True) / size.clamp(min=1e-300)
    return factor[:, :, 0, 0] if _close(ours * factor, wanted) else None


def _shifted_ratio(products: Tensor, scores: Tensor, keep: Tensor) -> float | None:
    """The factor between two [B, N, S, S], both measured from their diagonal, where `keep`; None if none fits."""
    ours, theirs = (
        torch.where(keep, part - torch.diagonal(part, dim1=-2, dim2=-1)[..., None], 0.0) for part in (products, scores)
    )
    size = float(ours.square().sum())
    if not size:
        return None
    ratio = float((ours * theirs).sum()) / size
    return ratio if _close(ours * ratio, theirs) else None
