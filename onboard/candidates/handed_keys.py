"""Candidates for attention with the keys and values of an earlier layer."""

import itertools
from collections.abc import Iterator

from torch import Tensor

from dayzero.onboard.candidates.attention import AttentionSolver
from dayzero.onboard.candidates.attention_pieces import Piece
from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.softmax import watch
from dayzero.onboard.candidates.where_held import named
from dayzero.onboard.oracle.calls import same
from dayzero.onboard.structure.left import handed_heads
from dayzero.runtime.weights import Stored


def propose_attention_with_handed_keys(site: Site) -> list[Candidate]:
    """Where what the softmax was given for keys, and what it weighed, is what an earlier layer left."""
    if site.call.hidden.ndim != 3 or not handed_heads(site.call):
        return []
    linears = {path: call for path, call in linear_calls(site).items() if call.hidden.ndim == 3}
    ends = [path for path, call in linears.items() if same(call.result, site.call.result)]
    return [
        candidate
        for seen in (watch(site.call) if ends else [])
        for candidate in _HandedSolver(site, linears, ends[-1], seen).candidates()
    ]


class _HandedSolver(AttentionSolver):
    """Only queries and what becomes of the weighted sums are to be solved."""

    def candidates(self) -> Iterator[Candidate]:
        visible, scores, sinks = self._visibility(), self._scores(), self._sinks()
        names = [
            name
            for name, (key, value) in handed_heads(self.site.call).items()
            if _equal(key, self.key) and _equal(value, self.value)
        ]
        if not names or visible is None or scores is None or sinks is None:
            return
        outputs = list(self._outputs())
        for query, grown in self._roads(self.query, positions=True):
            parameters = self._projection("query", query.piece)
            if query.norm is not None and query.norm.weight is not None:
                parameters["query_norm.weight"] = Stored(f"{query.norm.path}.{query.norm.weight}")
            for name, output in itertools.product(names, outputs):
                taken = {"takes": literal(name, "handed to the layer")}
                made = self._shared_arguments(query, query) | taken | sinks[0] | output[0]
                for factors, seen in itertools.product(self._query_factors(query, grown, scores), visible):
                    arguments: dict[str, Evidence | Candidate] = {**made, **factors, **seen}
                    yield Candidate("GroupedQueryAttention", arguments, parameters | sinks[1] | output[1])

    def _kv_heads(self, key: Piece) -> Evidence:
        found = named(self.site, self.kv_heads, ("key_value", "kv", "heads"))
        return found or literal(self.kv_heads, "what the layer is handed")


def _equal(handed: Tensor, seen: Tensor) -> bool:
    """Whether [B, G, S, D] is what was seen, [B, S, G, D]."""
    return same(handed.transpose(1, 2).contiguous(), seen)
