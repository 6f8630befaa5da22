"""Candidates for attention with a bias by distance that each token mixes from learned profiles."""

from collections.abc import Iterator

import torch
from torch import Tensor

from dayzero.onboard.candidates.attention import AttentionSolver
from dayzero.onboard.candidates.attention_pieces import Piece
from dayzero.onboard.candidates.evidence import Candidate, Site, size
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.softmax import SoftmaxSeen, watch
from dayzero.onboard.oracle.calls import same
from dayzero.runtime.weights import Stored


class _RelativeSolver(AttentionSolver):
    """Scores less the bias are the products' multiple."""

    block = "RelativeAttention"

    def __init__(self, site: Site, linears: dict, end: str, seen: SoftmaxSeen, bias: Tensor):
        super().__init__(site, linears, end, seen)
        self.bias = bias

    def _given_scores(self) -> Tensor:
        growth = next((grown for _, grown in self._roads(self.query, positions=True)), None)
        if growth is None:
            return super()._given_scores()
        # A bias grows with its query; the first position, where nothing has grown yet, says what is constant.
        return super()._given_scores() - self.bias * (growth / growth[:, :1])[:, None, :, None]


def propose_relative_attention(site: Site) -> list[Candidate]:
    """Every projection of the input and every matrix below the module that together could make the bias."""
    linears = {path: call for path, call in linear_calls(site).items() if call.hidden.ndim == 3}
    ends = [path for path, call in linears.items() if same(call.result, site.call.result)]
    if not ends or site.call.hidden.ndim != 3:
        return []
    return [
        candidate
        for seen in watch(site.call)
        for piece, name in _sources(site, linears, seen)
        for candidate in _with_bias(site, linears, ends[-1], seen, piece, name)
    ]


def _sources(site: Site, linears: dict, seen: SoftmaxSeen) -> Iterator[tuple[Piece, str]]:
    """(projection, profiles) whose sizes fit: [N * d, H] and [d, extent]."""
    taken = {f"{path}.weight" for path in linears}
    for name, parameter in site.module.named_parameters():
        if parameter.ndim != 2 or name in taken:
            continue
        for path, call in linears.items():
            rows = call.result.shape[-1]
            if same(call.hidden, site.call.hidden) and rows == seen.query.shape[1] * parameter.shape[0]:
                yield Piece(path, 0, rows, 1, whole=True), name


def _with_bias(site: Site, linears: dict, end: str, seen: SoftmaxSeen, piece: Piece, name: str) -> Iterator[Candidate]:
    profiles = site.module.get_parameter(name).detach()
    heads, length = seen.query.shape[1:3]
    by_age = (linears[piece.path].result.unflatten(-1, (heads, -1)) @ profiles).transpose(1, 2)
    at = torch.arange(length)
    age = at[:, None] - at
    bias = by_age.gather(-1, age.clamp(0, profiles.shape[1] - 1).expand(*by_age.shape[:2], -1, -1))
    bias = bias.masked_fill((age < 0) | (age >= profiles.shape[1]), 0.0)
    for attention in _RelativeSolver(site, linears, end, seen, bias).candidates():
        arguments = {"attention": attention, "relative_dim": size(name, 0), "extent": size(name, 1)}
        yield Candidate(
            "RelativeAttention",
            arguments,  # type: ignore[arg-type]
            {"relative.weight": Stored(f"{piece.path}.weight"), "profiles": Stored(name)},
        )
