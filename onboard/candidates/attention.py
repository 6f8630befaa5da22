"""Candidates for softmax attention, solved in pieces: what makes queries and keys (`attention_roads.py`), what makes
values, what becomes of the weighted sums, and what stands between the products and the softmax.

Each piece is matched against what the module really fed to its softmax (`softmax.py`), so that few candidates are left.
"""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from dayzero.onboard.candidates.attention_pieces import Piece, Road
from dayzero.onboard.candidates.attention_roads import RoadsSolver
from dayzero.onboard.candidates.attention_stops import attention_stop
from dayzero.onboard.candidates.equality import CLOSE, close, multiple
from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal, present, size
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.softmax import watch
from dayzero.onboard.candidates.where_held import any_number, as_float, constant, divided, held, named, rank
from dayzero.onboard.oracle.calls import same
from dayzero.onboard.structure.left import handed_heads
from dayzero.runtime.nn.attention import GATES
from dayzero.runtime.weights import Source, Squeeze, Stored


def propose_attention(site: Site) -> list[Candidate]:
    """Grouped-query attention with every norm, rotation, gate, sink and mask that the captured values allow."""
    linears = {path: call for path, call in linear_calls(site).items() if call.hidden.ndim == 3}
    ends = [path for path, call in linears.items() if same(call.result, site.call.result)]
    if not ends or site.call.hidden.ndim != 3:
        return []
    candidates: list[Candidate] = []
    for seen in watch(site.call):
        candidates += AttentionSolver(site, linears, ends[-1], seen).candidates()
    return candidates


class AttentionSolver(RoadsSolver):
    """block: what its candidates are, or are inside of."""

    block = "GroupedQueryAttention"

    # --- all together -----------------------------------------------------------------------------------------------

    def candidates(self) -> Iterator[Candidate]:
        found = self._together()
        first = next(found, None)
        if first is not None:
            yield first
        elif self.site.stops is not None:
            self.site.stops.append(attention_stop(self))
        yield from found

    def _together(self) -> Iterator[Candidate]:
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
        left = self._left() if pairs else {}
        for (query, grown), (key, ratio) in pairs:
            key_factors = self._factor("key", float(ratio.flatten()[0]), self.before[key])
            query_arguments = list(self._query_factors(query, grown, scores))
            for value, output in itertools.product(values, outputs):
                made = self._shared_arguments(query, key) | value[0] | sinks[0] | output[0] | left
                parameters = self._query_key_parameters(query, key) | value[1] | sinks[1] | output[1]
                value_factors = self._factor("value", value[2], self.value)
                for pieces in itertools.product(query_arguments, key_factors, value_factors, visible):
                    arguments: dict[str, Evidence | Candidate] = {**made}
                    for piece in pieces:
                        arguments |= piece
                    yield Candidate("GroupedQueryAttention", arguments, parameters)

    def _left(self) -> dict[str, Evidence]:
        """The name under which the module leaves its keys and values, where it does."""
        for name, (key, value) in handed_heads(self.site.call, after=True).items():
            pairs = ((key, self.key), (value, self.value))
            if all(same(left.transpose(1, 2).contiguous(), seen) for left, seen in pairs):
                return {"leaves": literal(name, "found in what the layer is handed, after it ran")}
        return {}

    def _query_key_parameters(self, query: Road, key: Road) -> dict[str, Source]:
        parameters = {**self._projection("query", query.piece), **self._projection("key", key.piece)}
        for ours, road in (("query_norm", query), ("key_norm", key)):
            if road.norm is not None and road.norm.weight is not None:
                parameters[f"{ours}.weight"] = Stored(f"{road.norm.path}.{road.norm.weight}")
        return parameters

    def _shared_arguments(self, query: Road, key: Road) -> dict[str, Evidence]:
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

    def _projection(self, ours: str, piece: Piece) -> dict[str, Source]:
        module = self.linears[piece.path].module
        kinds = ("weight",) if module.bias is None else ("weight", "bias")
        made = {f"{ours}.{kind}": piece.source(kind) for kind in kinds}
        if (mixed := self.mixes.get(piece.path)) is not None:
            made[f"{ours}_mix"] = Squeeze((1,), Stored(mixed[0]))
        return made

    # --- sizes ------------------------------------------------------------------------------------------------------

    def _head_dim(self, query: Road) -> Evidence:
        if query.kind == "head" and query.norm is not None and query.norm.weight is not None:
            return size(f"{query.norm.path}.{query.norm.weight}", 0)
        return named(self.site, self.head_dim, ("head_dim", "dim", "size")) or divided(
            size(f"{self.end}.weight", 1),
            named(self.site, self.heads, ("heads",)) or literal(self.heads, "the softmax"),
        )

    def _heads(self) -> Evidence:
        if self.value_dim == self.head_dim and (dim := named(self.site, self.head_dim, ("head_dim", "dim", "size"))):
            return divided(size(f"{self.end}.weight", 1), dim)
        return named(self.site, self.heads, ("heads",)) or literal(self.heads, "the softmax's input")

    def _kv_heads(self, key: Piece) -> Evidence:
        dim = named(self.site, self.head_dim, ("head_dim", "dim", "size"))
        if key.whole and dim is not None:
            return divided(size(f"{key.path}.weight", 0), dim)
        found = named(self.site, self.kv_heads, ("key_value", "kv", "heads"))
        return found or literal(self.kv_heads, "heads that differ in the softmax's input")

    def _value_dim(self) -> Evidence:
        return named(self.site, self.value_dim, ("v_head", "value", "dim")) or literal(
            self.value_dim, "the softmax's output"
        )

    # --- factors ----------------------------------------------------------------------------------------------------

    def _factor(self, part: str, ratio: float, made: Tensor) -> list[dict[str, Evidence]]:
        """The argument for a constant factor of `made`, [B, S, heads, D]; for one of 1, where the module is seen to
        multiply by it."""
        if abs(ratio - 1.0) > CLOSE:
            exact = constant(self.site, ratio)
            return [{f"{part}_factor": self._number(exact, (part, part[0] + "_", "mult"))}] if exact is not None else []
        if not self._multiplied_by_one(made):
            return [{}]
        ones = sorted(held(self.site, 1.0, float), key=lambda evidence: rank(evidence, (part, part[0] + "_")))
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

    def _number(self, value: float, words: tuple[str, ...]) -> Evidence:
        """Where a constant is held; the head size's powers where nothing holds it."""
        found = [*held(self.site, value, float)]
        found.sort(key=lambda evidence: rank(evidence, words))
        dim = named(self.site, self.head_dim, ("head_dim", "dim", "size"))
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
        for name, other in sorted(self.site.config.to_dict().items()):
            if isinstance(other, (int, float)) and not isinstance(other, bool) and other > 0 and other**-0.5 == value:
                found.append(
                    Evidence(f"config {name} ** -0.5", lambda module, config, name=name: getattr(config, name) ** -0.5)
                )
        return found[0] if found else literal(value, "constant in the trace")

    def _query_factors(
        self, query: Road, grown: Tensor, scores: tuple[float, float | None, Evidence | None]
    ) -> Iterator[dict[str, Evidence]]:
        """Arguments about what multiplies queries and scores."""
        ratio, _, softcap = scores
        capped = {} if softcap is None else {"softcap": softcap}
        for arguments, rest in self._growths(grown):
            both = rest * ratio
            if abs(rest - 1.0) <= CLOSE or abs(ratio - 1.0) <= CLOSE:
                # One factor, wherever it stands: on queries or on scores.
                exact = 1.0 if abs(both - 1.0) <= CLOSE else constant(self.site, both)
                if exact is None:
                    continue
                scale = self._scale_of_one() if exact == 1.0 else self._number(exact, ("scal",))
                for factor in self._factor("query", 1.0, self.before[query]):
                    yield {**arguments, **factor, "scale": scale, **capped}
            else:
                inner, outer = constant(self.site, rest), constant(self.site, ratio)
                if inner is not None and outer is not None:
                    factor = {"query_factor": self._number(inner, ("query", "q_", "qk", "scale"))}
                    yield {**arguments, **factor, "scale": self._number(outer, ("scal",)), **capped}

    def _scale_of_one(self) -> Evidence:
        """A scale of 1: an attribute where scores or queries are multiplied by it."""
        ones = held(self.site, 1.0, float)
        if ones and any(found.numel() == self.seen.products.numel() for found in self.seen.multiplied_by_one):
            ones.sort(key=lambda evidence: rank(evidence, ("scal",)))
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
                    "query_scale_factor": as_float(any_number(self.site, factor, ("scale", "alpha", "beta"))),
                    "query_scale_length": as_float(any_number(self.site, length, ("floor", "length", "scale"))),
                }
                yield arguments, float(left[0, 0])

    # --- values and outputs -----------------------------------------------------------------------------------------

    def _values(self) -> Iterator[tuple[dict[str, Evidence], dict[str, Source], float]]:
        """(arguments, parameters, factor)."""
        heads, dim = self.value.shape[2:]
        keys = {road.piece for road, _ in self._roads(self.key, positions=False)}
        norms = [None, *(norm for norm in self._norms(dim) if norm.weight is None)]
        for piece, norm in itertools.product(self._pieces(heads * dim), norms):
            start = self._result(piece)
            for clip in self._clips:
                bound = None if clip is None else clip.resolve(self.site.module, self.site.config)
                value = (start if bound is None else start.clamp(-bound, bound)).unflatten(-1, (heads, dim))
                if norm is not None:
                    value = norm.of(self.site.module, value)
                ratio = multiple(value, self.value, by_position=False)
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
            start = self.attended if norm is None else norm.of(self.site.module, self.attended)
            arguments = {} if norm is None else {"output_norm_eps": norm.eps}
            if close(start, wanted):
                yield arguments, last
                return
            for gated, parameters in self._gates(start, wanted):
                yield {**arguments, **gated}, {**last, **parameters}
            for name, left in self._left_by_sinks():
                if close(start * left, wanted):
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
                for (name, bias), (act, function) in itertools.product(self._biases(), GATES.items()):
                    shifted = gate if bias is None else gate + bias[:, None]
                    if close(start * function(shifted), wanted):
                        arguments = {"gate": literal(act, "what the last projection was given")}
                        parameters: dict[str, Source] = {"gate.weight": piece.source("weight")}
                        if per_head:
                            arguments["gate_per_head"] = literal(True, "the projection's width")
                        if name is not None:
                            arguments["gate_bias"] = literal(True, "what the last projection was given")
                            parameters["gate_bias"] = Stored(name)
                        yield arguments, parameters

    def _whole_pieces(self, rows: int) -> Iterator[Piece]:
        return (piece for piece in self._pieces(rows) if piece.whole)

    def _biases(self) -> list[tuple[str | None, Tensor | None]]:
        own = self.site.module.named_parameters(recurse=False)
        return [(None, None), *((name, p.detach()) for name, p in own if p.shape == (self.heads,))]
