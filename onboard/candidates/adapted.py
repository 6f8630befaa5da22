"""Candidates for a module whose projections have low-rank additions: what it would be without them, and the additions.

The module may hold several sets of additions in lists, one for each layer that shares it; which one a call uses is seen
from what it calls.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.oracle.calls import Call, same
from dayzero.onboard.structure.uses import list_around, members
from dayzero.runtime.weights import Source, Stored


@dataclass(frozen=True)
class _Addition:
    """Paths of linears: `down` and `up` after each other read what `base` reads, and their result is added to its."""

    base: str
    down: str
    up: str

    def place(self, module: nn.Module, path: str, use: int) -> str:
        """The path of one of its linears in a set of additions."""
        around = list_around(module, path)
        if around is None:
            return path
        rest = path.removeprefix(f"{around}.").partition(".")[2]
        return f"{around}.{members(module, around)[use]}{f'.{rest}' if rest else ''}"

    def uses(self, module: nn.Module) -> int:
        around = list_around(module, self.down)
        return 1 if around is None else len(members(module, around))


def propose_adapted(site: Site, proposers: Sequence[Callable[[Site], list[Candidate]]]) -> list[Candidate]:
    """What the proposers say of the module with each projection and its addition as one; [] without additions."""
    additions = _additions(site)
    if not additions:
        return []
    joined = _joined(site, additions)
    candidates = [candidate for propose in proposers for candidate in propose(joined)]
    found = [_adapted(site, candidate, additions) for candidate in candidates]
    return [candidate for candidate in found if candidate is not None]


def _additions(site: Site) -> list[_Addition]:
    linears = linear_calls(site)
    pairs = [
        (down, up)
        for down, one in linears.items()
        for up, two in linears.items()
        if one.result is two.hidden and one.module.bias is None and two.module.bias is None
    ]
    found = []
    for down, up in pairs:
        for base, call in linears.items():
            if call.result.shape == linears[up].result.shape and same(call.hidden, linears[down].hidden):
                found.append(_Addition(base, down, up))
    if not found:
        return []
    sums = _sums(site.call)
    return [
        held for held in found if any(_are(pair, (linears[held.base].result, linears[held.up].result)) for pair in sums)
    ]


def _are(pair: tuple[Tensor, Tensor], wanted: tuple[Tensor, Tensor]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(pair, wanted, strict=True)) or all(
        a.shape == b.shape and torch.equal(a, b) for a, b in zip(pair, reversed(wanted), strict=True)
    )


class _Sums(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.add.Tensor and all(isinstance(arg, Tensor) for arg in args):
            self.found.append((args[0].clone(), args[1].clone()))
        return output


def _sums(call: Call) -> list[tuple[Tensor, Tensor]]:
    """What the module adds to each other."""
    with torch.no_grad(), _Sums() as sums:
        call.replay(call.hidden)
    return sums.found


def _joined(site: Site, additions: Sequence[_Addition]) -> Site:
    """The site as if each projection gave the sum itself."""
    inner = dict(site.inner)
    for held in additions:
        base = inner[held.base]
        inner[held.base] = replace(base, output=base.result + site.inner[held.up].result)
    for path in {path for held in additions for path in (held.down, held.up)}:
        inner.pop(path, None)
    return Site(site.call, inner, site.config)


def _adapted(site: Site, candidate: Candidate, additions: Sequence[_Addition]) -> Candidate | None:
    """The candidate with its additions; None where they do not belong to projections of its own."""
    targets: list[list[str]] = []
    parameters: dict[str, Source] = {}
    uses = {held.uses(site.module) for held in additions}
    if len(uses) != 1:
        return None
    count = uses.pop()
    for number, held in enumerate(additions):
        weight = f"{held.base}.weight"
        rows = _of(candidate.parameters, weight)
        if not rows:
            return None
        targets.append(list(rows))
        for use in range(count):
            down, up = (held.place(site.module, path, use) for path in (held.down, held.up))
            parameters[f"uses.{use}.{number}.down.weight"] = Stored(f"{down}.weight")
            for name, source in rows.items():
                own = source.renamed(lambda _, up=up: f"{up}.weight")
                parameters[f"uses.{use}.{number}.up.{name}.weight"] = own
    first = additions[0]
    arguments: dict[str, Evidence | Candidate] = {
        "block": candidate,
        "targets": literal(targets, "what the module adds to its projections"),
        "rank": Evidence(
            f"rows of {first.down}",
            lambda module, config: module.get_parameter(f"{first.place(module, first.down, 0)}.weight").shape[0],
        ),
        "uses": Evidence(f"members of the list around {first.down}", lambda module, config: first.uses(module)),
    }
    return Candidate("Adapted", arguments, parameters)


def _of(parameters: Mapping[str, Source], weight: str) -> dict[str, Source]:
    """Projection of the block -> its expression, for those that are made of this tensor alone, in the order of rows."""
    return {
        name.removesuffix(".weight"): source
        for name, source in parameters.items()
        if name.endswith(".weight") and set(source.names({})) == {weight}
    }
