"""Candidates for attention that keeps the keys whose own values give the largest numbers."""

from collections.abc import Iterator
from functools import cached_property

import torch
from torch import Tensor

from dayzero.onboard.candidates.attention import AttentionSolver
from dayzero.onboard.candidates.equality import multiple
from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal, present
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.softmax import SoftmaxSeen, watch
from dayzero.onboard.candidates.where_held import named
from dayzero.onboard.oracle.calls import Call, same
from dayzero.runtime.weights import Source, Stored


class _KeepingSolver(AttentionSolver):
    """Scores less the numbers are the products' multiple, where keys are kept. numbers: [B, G, S], of the keys."""

    block = "DynamicMaskAttention"

    def __init__(self, site: Site, linears: dict[str, Call], end: str, seen: SoftmaxSeen, numbers: Tensor, keep: int):
        super().__init__(site, linears, end, seen)
        self.numbers, self.keep = numbers, keep
        self.kept = super()._seen_keys()

    def _scores(self) -> tuple[float, float | None, Evidence | None] | None:
        added = self.numbers.repeat_interleave(self.heads // self.numbers.shape[1], 1)[:, :, None]
        products, left = (
            torch.where(self.kept, part, 0.0) for part in (self.seen.products, self._given_scores() - added)
        )
        ratio = multiple(products, left, by_position=False)
        return None if ratio is None else (float(ratio.flatten()[0]), None, None)

    def _seen_keys(self) -> Tensor:
        """Those among which the kept ones were chosen, where some mask by distance explains which were kept."""
        return self._visible

    @cached_property
    def _visible(self) -> Tensor:
        for visible in _masks(self.kept.shape[-1]):
            if torch.equal(self._keeps(visible), self.kept):
                return visible.expand_as(self.kept)
        return self.kept

    def _keeps(self, visible: Tensor) -> Tensor:
        """[B, N, S, S] bool: the best of the visible keys."""
        among = self.numbers[:, :, None].expand(-1, -1, visible.shape[0], -1)
        best = among.masked_fill(~visible, torch.finfo(among.dtype).min).topk(self.keep, -1, sorted=False).indices
        kept = torch.zeros_like(among, dtype=torch.bool).scatter(-1, best, True) & visible
        return kept.repeat_interleave(self.heads // kept.shape[1], 1)


def _masks(length: int) -> Iterator[Tensor]:
    """[S, S] bool: what came before, the last few of it, or what came before in runs; everything."""
    at = torch.arange(length)
    age = at[:, None] - at
    yield age >= 0
    for extent in range(1, length):
        yield (age >= 0) & (age < extent)
        yield (age >= 0) & (at[:, None] // extent == at // extent)
    yield torch.ones_like(age, dtype=torch.bool)


def propose_dynamic_mask(site: Site) -> list[Candidate]:
    """Every projection of the values to a number a head, with every vector that could be its rate."""
    if site.call.hidden.ndim != 3 or not {"softplus", "exp", "topk"} <= site.operations.steps:
        return []
    linears = {path: call for path, call in linear_calls(site).items() if call.hidden.ndim == 3}
    ends = [path for path, call in linears.items() if same(call.result, site.call.result)]
    return [
        _around(attention, path, rate, keep, linears[path])
        for seen in (watch(site.call) if ends else [])
        for path, rate, numbers in _numbers(site, seen, linears)
        for count, keep in _counts(site, seen.scores.shape[2])
        for attention in _KeepingSolver(site, linears, ends[-1], seen, numbers, count).candidates()
    ]


def _numbers(site: Site, seen: SoftmaxSeen, linears: dict[str, Call]) -> Iterator[tuple[str, str, Tensor]]:
    """(path of a projection of all values, name of a vector, the numbers [B, G, S] that they make together)."""
    for path, call in linears.items():
        groups = call.result.shape[-1]
        if seen.value.shape[1] % groups:
            continue
        values = seen.value[:, :: seen.value.shape[1] // groups]
        if same(call.hidden, values.transpose(1, 2).flatten(2)):
            for name, rate in site.module.named_parameters(recurse=False):
                if rate.shape == (groups,):
                    yield path, name, torch.exp(rate.detach() * torch.nn.functional.softplus(call.result)).mT


def _counts(site: Site, length: int) -> Iterator[tuple[int, Evidence]]:
    """How many of the keys were kept, as the trace says, and where that is held."""
    steps = [step for step in site.operations.sequence if step.name == "topk" and step.shape[-1] == length]
    for count in dict.fromkeys(int(step.numbers[0]) for step in steps):
        yield count, named(site, count, ("keep", "window")) or literal(count, "the top-k of the trace")


def _around(attention: Candidate, path: str, rate: str, keep: Evidence, step: Call) -> Candidate:
    kinds = ("weight",) if step.module.bias is None else ("weight", "bias")
    parameters: dict[str, Source] = {f"step.{kind}": Stored(f"{path}.{kind}") for kind in kinds}
    arguments: dict[str, Evidence | Candidate] = {
        "attention": attention,
        "keep": keep,
        "bias": present(f"{path}.bias"),
    }
    return Candidate("DynamicMaskAttention", arguments, {**parameters, "rate": Stored(rate)})
