"""What a lifted class was seen to compute on the small model, in lines: what whoever writes a faster one must keep."""

import inspect
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

from torch import Tensor

from dayzero.onboard.candidates.evidence import Candidate, Site, site_of
from dayzero.onboard.candidates.lifted import LiftedCandidate
from dayzero.onboard.oracle.reference import state_of
from dayzero.onboard.prove.trace import Operations, Step, trace_around
from dayzero.onboard.structure.handed import made_already

_LINES = 60  # of operators; a recurrence without end is cut there
_LONGEST = 16  # operators of one round of a loop
# What makes no number: views, copies, reservations.
_SILENT = {
    "view", "unsafe_view", "reshape_alias", "expand", "t", "transpose", "permute", "slice", "select", "split",
    "split_with_sizes", "unbind", "squeeze", "unsqueeze", "detach", "alias", "clone", "lift_fresh", "to_copy", "copy",
    "as_strided", "empty_like", "new_empty", "empty", "native_dropout", "dropout", "contiguous",
}  # fmt: skip


def computes(site: Site, candidate: Candidate) -> dict[str, list[str]]:
    """Lines for each lifted class that the candidate is made of: what it is handed, gives and holds, and the operators
    that it ran, with their constants. Sizes are fields of the config where one has that value."""
    return {name: list(_lines(at, inside)) for name, at, inside in _lifted(site, candidate, "")}


def _lifted(site: Site, candidate: Candidate, path: str) -> Iterator[tuple[str, Site, Mapping[str, Candidate]]]:
    """(class, its site, what of ours stands inside it) of the candidate at `path`, and of those inside it."""
    inner = dict(getattr(candidate, "replace", {}))
    if isinstance(candidate, LiftedCandidate) and candidate.lift is not None:
        yield candidate.lift.name, _below(site, f"{path}.{candidate.at}".strip(".")), inner
    for name, held in inner.items():
        yield from _lifted(site, held, f"{path}.{name}".strip("."))
    for held in candidate.arguments.values():
        if isinstance(held, Candidate):
            yield from _lifted(site, held, path)


def _below(site: Site, path: str) -> Site:
    if not path:
        return site
    return site_of({f"outer.{name}": call for name, call in site.inner.items()}, f"outer.{path}", site.config)


def _lines(site: Site, inside: Mapping[str, Candidate]) -> Iterator[str]:
    sizes = _Sizes(site)
    call = site.call
    for name, value in _arguments(site).items():
        yield f"handed   {name}: {_shown(value, sizes)}"
    yield f"gives    {_shown(call.output, sizes)}"
    own = {name: held for name, held in state_of(site.module).items() if not name.startswith(tuple(inside))}
    for name, tensor in own.items():
        yield f"holds    {name}: {_shown(tensor, sizes)}"
    for path, held in inside.items():
        yield f"calls    {path}: {held.block}, which is proven and is called as it is"
    with made_already(site.inner):
        seen = trace_around(lambda: call.replay(call.hidden), {p: site.module.get_submodule(p) for p in inside})
    for line in _steps(seen, sizes):
        yield f"runs     {line}"
    if seen.constants:
        yield f"with     the constants {', '.join(f'{value:.17g}' for value in sorted(seen.constants))}"


def _arguments(site: Site) -> dict[str, Any]:
    signature = inspect.signature(type(site.module).forward)
    try:
        bound = signature.bind(None, *site.call.args, **site.call.kwargs).arguments
    except TypeError:
        bound = dict(enumerate(site.call.args)) | site.call.kwargs
        return {str(name): value for name, value in bound.items()}
    return {str(name): value for name, value in list(bound.items())[1:]}


def _shown(value: Any, sizes: "_Sizes") -> str:
    if isinstance(value, Tensor):
        kind = "float" if value.is_floating_point() else str(value.dtype).removeprefix("torch.")
        return f"{kind} {sizes.shape(value.shape)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}: {_shown(held, sizes)}" for name, held in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_shown(held, sizes) for held in value) + ")"
    return repr(value) if value is None or isinstance(value, (bool, int, float, str)) else type(value).__name__


class _Sizes:
    """Sizes by what they count: B documents, S tokens of each, T of all; else the config field with that value, or the
    two whose product it is; else the number itself, as it is on the small model."""

    def __init__(self, site: Site) -> None:
        lengths = site.context.lengths
        self.batch, length = len(lengths), lengths[0]
        self.names: dict[int, str] = {}
        fields = [
            (value, name)
            for name, value in sorted(site.config.to_dict().items())
            if isinstance(value, int) and not isinstance(value, bool) and value > 3 and _counts(name)
        ]
        for (a, first), (b, second) in combinations(fields, 2):
            self.names.setdefault(a * b, f"{first} * {second}")
        for value, name in fields:
            self.names.setdefault(2 * value, f"2 * {name}")
        self.names |= dict(reversed(fields))
        self.names |= {length: "S", self.batch * length: "T"}

    def shape(self, shape: Sequence[int]) -> str:
        return "[" + ", ".join(self._size(size, place) for place, size in enumerate(shape)) + "]"

    def _size(self, size: int, place: int) -> str:
        return "B" if size == self.batch and place == 0 else self.names.get(size, str(size))


def _counts(field: str) -> bool:
    """Whether a field may be a size: ids of tokens are none."""
    return not field.endswith(("_id", "_ids", "_token", "_index")) and "vocab" not in field


def _steps(seen: Operations, sizes: _Sizes) -> Iterator[str]:
    lines = [_step(step, sizes) for step in seen.sequence if step.name.strip("_") not in _SILENT]
    folded = list(_folded(lines))
    yield from folded[:_LINES]
    if len(folded) > _LINES:
        yield f"and {len(folded) - _LINES} more, as lifted.py has them"


def _step(step: Step, sizes: _Sizes) -> str:
    numbers = ", ".join(f"{number:.10g}" for number in step.numbers)
    given = f" -> {sizes.shape(step.gives)}" if step.gives != step.shape else ""
    return f"{step.name.strip('_')} {sizes.shape(step.shape)}{given}" + (f"; {numbers}" if numbers else "")


def _folded(lines: list[str]) -> Iterator[str]:
    """Rounds of a loop once, with how often they ran."""
    at = 0
    while at < len(lines):
        best = (1, 1)  # lines of a round, rounds
        for size in range(1, min(_LONGEST, (len(lines) - at) // 2) + 1):
            rounds = 1
            while lines[at + rounds * size : at + (rounds + 1) * size] == lines[at : at + size]:
                rounds += 1
            if rounds > 1 and (rounds - 1) * size > (best[1] - 1) * best[0]:
                best = size, rounds
        size, rounds = best
        yield from lines[at : at + size]
        if rounds > 1:
            yield f"... the last {size} again, {rounds} times in all" if size > 1 else f"... {rounds} times in all"
        at += size * rounds
