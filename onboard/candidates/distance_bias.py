"""Candidates for attention with a learned bias by distance, its own or one that an earlier layer made."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from dayzero.onboard.candidates.attention import AttentionSolver
from dayzero.onboard.candidates.equality import multiple
from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal, size
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.softmax import SoftmaxSeen, watch
from dayzero.onboard.candidates.where_held import any_number
from dayzero.onboard.oracle.calls import same
from dayzero.runtime.nn.distance_bias import BIAS, bucket_of
from dayzero.runtime.weights import Source, Stored


class _BiasedSolver(AttentionSolver):
    """Scores less the bias are the products' multiple."""

    block = "DistanceBiasedAttention"

    def __init__(self, site: Site, linears: dict, end: str, seen: SoftmaxSeen, bias: Tensor):
        super().__init__(site, linears, end, seen)
        self.bias = bias

    def _given_scores(self) -> Tensor:
        return super()._given_scores() - self.bias


def propose_distance_bias(site: Site) -> list[Candidate]:
    """Every table below the module whose buckets could make what is added to the scores; or what the module is handed,
    where that is one bias for each distance."""
    if site.call.hidden.ndim != 3 or site.call.source is not None:
        return []
    linears = {path: call for path, call in linear_calls(site).items() if call.hidden.ndim == 3}
    ends = [path for path, call in linears.items() if same(call.result, site.call.result)]
    handed = site.context.shared.get(BIAS)
    if not ends or (handed is None and "log" not in site.operations.steps):
        return []
    found = []
    for seen in watch(site.call):
        for by_age, arguments, parameters in _biases(site, seen, linears, handed):
            length = seen.scores.shape[2]
            age = torch.arange(length)[:, None] - torch.arange(length)
            bias = by_age[age + length - 1].permute(2, 0, 1)[None]
            for attention in _BiasedSolver(site, linears, ends[-1], seen, bias).candidates():
                found.append(Candidate("DistanceBiasedAttention", {"attention": attention, **arguments}, parameters))
    return found


def _biases(
    site: Site, seen: SoftmaxSeen, linears: dict, handed: Tensor | None
) -> Iterator[tuple[Tensor, dict[str, Evidence], dict[str, Source]]]:
    """(bias by age [2 S - 1, N], arguments, parameters)."""
    heads, length = seen.query.shape[1:3]
    if handed is not None:
        if handed.shape == (2 * length - 1, heads):
            yield handed, {}, {}
        return
    keep = seen.scores > -1e30
    at = torch.arange(length)
    age = at[:, None] - at
    for name, table in site.module.named_parameters():
        if table.ndim != 2 or table.shape[1] != heads or name.removesuffix(".weight") in linears:
            continue
        for farthest in _distances(site, table.shape[0]):
            for both_ways in (False, True):
                value, single = farthest
                by_age = table.detach()[
                    bucket_of(torch.arange(1 - length, length), table.shape[0], value, both_ways, torch.float64)
                ]
                made = by_age[age + length - 1].permute(2, 0, 1)[None].expand_as(seen.scores)
                if single == _single(table.shape[0], both_ways) and _differ_by_products(seen, made, keep):
                    arguments = {
                        "buckets": size(name, 0),
                        "max_distance": any_number(site, value, ("distance", "max")),
                        "both_ways": literal(both_ways, "which biases keys after their query get"),
                    }
                    yield by_age, arguments, {"table": Stored(name)}


def _single(buckets: int, both_ways: bool) -> int:
    return (buckets // 2 if both_ways else buckets) // 2


def _distances(site: Site, buckets: int) -> Iterator[tuple[int, int]]:
    """(farthest distance, buckets of one distance) whose logarithm the trace divides by; the farthest is held by an
    attribute or field."""
    for single in dict.fromkeys((_single(buckets, False), _single(buckets, True))):
        for constant in sorted(site.operations.constants):
            farthest = round(single * math.exp(constant)) if 0 < constant < 40 and single else 0
            if farthest > single and abs(math.log(farthest / single) - constant) <= 1e-12 * constant:
                yield farthest, single


def _differ_by_products(seen: SoftmaxSeen, bias: Tensor, keep: Tensor) -> bool:
    """Whether scores less the bias are a multiple of the products where keys are seen."""
    products, left = (torch.where(keep, part, 0.0) for part in (seen.products, seen.scores - bias))
    return multiple(products, left, by_position=False) is not None
