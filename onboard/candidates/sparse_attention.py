"""Candidates for grouped-query attention to what an indexer chooses: the attention as if it saw everything that the
mask shows, and the indexer beside it."""

from collections.abc import Iterator

import torch
from torch import nn

from dayzero.onboard.candidates.attention import AttentionSolver
from dayzero.onboard.candidates.equality import CLOSE
from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site
from dayzero.onboard.candidates.indexer import propose_indexers
from dayzero.onboard.candidates.latent_projections import selectors
from dayzero.onboard.candidates.softmax import watch
from dayzero.onboard.oracle.calls import same


class _SparseSolver(AttentionSolver):
    """The mask is the indexer's business, and a token need not see itself."""

    block = "IndexedAttention"

    def _visibility(self) -> list[dict[str, Evidence]] | None:
        return [{}]

    def _scores(self) -> tuple[float, float | None, Evidence | None] | None:
        seen = self._seen_keys()
        products, scores = self.seen.products[seen], self.seen.scores[..., : self.seen.key.shape[2]][seen]
        ratio = float((products @ scores) / (products @ products))
        close = bool((scores - ratio * products).abs().max() <= CLOSE * scores.abs().max())
        return (ratio, None, None) if close and ratio > 0 else None


def propose_sparse_attention(site: Site) -> list[Candidate]:
    """Every way to make what the softmax saw, with every indexer that the selecting module inside could be."""
    if site.call.hidden.ndim != 3:
        return []
    found = selectors(site)
    if len(found) != 1:
        return []
    indexers = propose_indexers(site, found[0], None)
    return [
        Candidate("IndexedAttention", {"attention": attention, "indexer": indexer}, {})
        for attention in (_attentions(site, found[0]) if indexers else ())
        for indexer in indexers
    ]


def _attentions(site: Site, indexer: str) -> Iterator[Candidate]:
    linears = {
        path: call
        for path, call in site.inner.items()
        if isinstance(call.module, nn.Linear) and call.hidden.ndim == 3 and not path.startswith(indexer + ".")
    }
    ends = [path for path, call in linears.items() if same(call.result, site.call.result)]
    for seen in watch(site.call) if ends else ():
        if seen.scores.shape[-1] == seen.key.shape[2] and seen.query.dtype == torch.float64:
            yield from _SparseSolver(site, linears, ends[-1], seen).candidates()
