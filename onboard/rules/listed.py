"""Parameters of parts that stand in a list of which the real model has more: copied experts, each its own module."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from dayzero.onboard.rules.expressions import NUMBER, NoRule, fold
from dayzero.runtime.weights import Source

_HOLE = "nth"


def continued(known: Mapping[str, Source], names: Iterable[str]) -> dict[str, Source]:
    """Expressions for those of `names` that continue a series of known parameters, `list.0.weight`, `list.1.weight` and
    so on, each made of tensors whose names hold the same number."""
    wanted = {name: holes for name in names if (holes := dict(_holes(name)))}
    if not wanted:
        return {}
    series: dict[str, dict[int, Source]] = defaultdict(dict)
    for name, source in known.items():
        for hole, number in _holes(name):
            series[hole][number] = source
    found: dict[str, Source] = {}
    for name, holes in wanted.items():
        for hole, number in holes.items():
            if (folded := _folded(series.get(hole, {}))) is not None:
                found[name] = folded.renamed(lambda held, n=number: held.replace("{" + _HOLE + "}", str(n)))
                break
    return found


def _holes(name: str) -> Iterable[tuple[str, int]]:
    """The name without one of its numbers, and that number, for each of them."""
    return [(f"{name[: hit.start()]}\0{name[hit.end() :]}", int(hit.group())) for hit in NUMBER.finditer(name)]


def _folded(members: Mapping[int, Source]) -> Source | None:
    if len(members) < 2 or sorted(members) != list(range(len(members))):
        return None
    try:
        return fold([members[number] for number in range(len(members))], _HOLE)
    except NoRule:
        return None
