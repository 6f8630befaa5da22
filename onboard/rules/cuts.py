"""Rows that several stored tensors hold one after the other, and several parameters too, cut at other places.

The rows that a reference joins while it loads are cut again when it saves, and not always where the checkpoint cuts
them: evenly, say, whatever the parts. Loading takes any cut, since only the order counts. So does a rule: where the
parameters end is known from their shapes, where the tensors end from the real headers.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from dayzero.onboard.rules.expressions import NoRule, stored_names
from dayzero.runtime.spec import RuleSpec, SourceSpec
from dayzero.runtime.weights import Concat, Excerpt, Part, Source


@dataclass(frozen=True)
class Run:
    """`stored`, side by side along `dim`, are `parameters` side by side. lengths: of those tensors that are cut."""

    dim: int
    parameters: tuple[str, ...]
    stored: tuple[Source, ...]
    lengths: tuple[int, ...]

    def sources(self, held: Sequence[int], wanted: Sequence[int]) -> dict[str, Source]:
        """The expression of every parameter. held: rows of the stored tensors; wanted: of the parameters, as many.
        Raises NoRule where these are not as many rows."""
        if sum(held) != sum(wanted):
            names = ", ".join(name for source in self.stored for name in stored_names(source))
            raise NoRule(f"{names} have {sum(held)} rows, and {', '.join(self.parameters)} {sum(wanted)}")
        found: dict[str, Source] = {}
        begin = 0
        for parameter, length in zip(self.parameters, wanted, strict=True):
            parts = list(self._between(begin, begin + length, held))
            found[parameter] = parts[0] if len(parts) == 1 else Concat(self.dim, tuple(parts))
            begin += length
        return found

    def _between(self, begin: int, end: int, held: Sequence[int]) -> Iterator[Source]:
        first = 0
        for source, length in zip(self.stored, held, strict=True):
            start, stop = max(begin, first) - first, min(end, first + length) - first
            if start < stop:
                yield source if (start, stop) == (0, length) else Part(self.dim, start, stop, source)
            first += length

    def evenly(self, rows: int) -> list[int]:
        """Lengths of the stored tensors at that many rows, cut as evenly as here. Raises NoRule where they are not."""
        if len(set(self.lengths)) > 1:
            name = stored_names(self.stored[0])[0]
            raise NoRule(f"{name} and others are cut at {list(self.lengths)}, which follows from no size of the config")
        each = -(-rows // len(self.stored))
        return [max(0, min(each, rows - number * each)) for number in range(len(self.stored))]


def runs_of(sources: Mapping[str, Source]) -> list[Run]:
    """The runs among expressions that use every row of what they read, exactly once: those of which a parameter reaches
    from one stored tensor into the next that it shares with another parameter."""
    pieces = {name: _pieces(source) for name, source in sources.items()}
    inside: dict[tuple[int, Source], list[tuple[int, str]]] = defaultdict(list)
    for name, held in pieces.items():
        for dim, part, start, _ in held:
            inside[dim, part].append((start, name))
    lengths: dict[tuple[int, Source], int] = {}
    for held in pieces.values():
        for dim, part, _, stop in held:
            if stop is not None:
                lengths[dim, part] = max(stop, lengths.get((dim, part), 0))
    going_on = {name for name, held in pieces.items() if _goes_on(held, lengths)}
    reached = {(dim, part) for name in going_on for dim, part, _, _ in pieces[name][1:]}
    found = []
    for key in inside:
        if key not in reached:
            parameters, stored = _follow(key, inside, pieces)
            if going_on.issuperset(parameters) and len(stored) > 1 and any(part in lengths for part in stored):
                known = tuple(lengths[part] for part in stored if part in lengths)
                found.append(Run(key[0], tuple(parameters), tuple(part for _, part in stored), known))
    return found


def _pieces(source: Source) -> list[tuple[int, Source, int, int | None]]:
    """(dim, what is cut, start, stop) of each part of an expression, stop None for all of it; [] for another kind."""
    parts = source.parts if type(source) is Concat else (source,)
    dims = {source.dim} if type(source) is Concat else {part.dim for part in parts if type(part) is Part}
    if len(dims) != 1 or any(isinstance(part, Excerpt) for part in parts):
        return []
    (dim,) = dims
    cut = [part if type(part) is Part and part.groups == 1 and part.dim == dim else None for part in parts]
    return [
        (dim, whole, 0, None) if part is None else (dim, part.part, part.start, part.stop)
        for whole, part in zip(parts, cut, strict=True)
    ]


def _goes_on(pieces: list[tuple[int, Source, int, int | None]], lengths: Mapping[tuple[int, Source], int]) -> bool:
    """Whether each piece ends where its tensor does, and the next begins where its own does."""
    ends = all(stop is None or stop == lengths[dim, part] for dim, part, _, stop in pieces[:-1])
    return ends and all(start == 0 for _, _, start, _ in pieces[1:])


def _follow(
    first: tuple[int, Source],
    inside: Mapping[tuple[int, Source], list[tuple[int, str]]],
    pieces: Mapping[str, list[tuple[int, Source, int, int | None]]],
) -> tuple[list[str], list[tuple[int, Source]]]:
    """The parameters and the stored tensors from `first` on, in the order of their rows."""
    parameters: list[str] = []
    stored = [first]
    for key in stored:  # grows on the way
        for _, name in sorted(inside[key]):
            if name not in parameters:
                parameters.append(name)
                stored += [(dim, part) for dim, part, _, _ in pieces[name] if (dim, part) not in stored]
    return parameters, stored


def cut_as_stored(
    rules: Sequence[RuleSpec], shapes: Mapping[str, tuple[int, ...]], stored: Mapping[str, tuple[int, ...]]
) -> list[RuleSpec]:
    """The rules with runs cut where the checkpoint's tensors end. shapes: of the parameters; stored: of the tensors.

    A run stays as it is where tensors are missing or have other rows in all: settling the ledger says which. Raises
    NoRule where layers that share a rule are cut at different places.
    """
    groups: dict[tuple, list[int]] = defaultdict(list)
    for number, rule in enumerate(rules):
        groups[tuple(rule.ranges.items())].append(number)
    found = list(rules)
    for numbers in groups.values():
        built = {rules[number].parameter: (number, rules[number].build()) for number in numbers}
        for run in runs_of({name: rule.source for name, (_, rule) in built.items()}):
            _, first = built[run.parameters[0]]
            each = [index for _, index in first.each()]
            try:
                held = {tuple(part.shape(stored, index)[run.dim] for part in run.stored) for index in each}
            except KeyError:
                continue
            if len(held) > 1:
                raise NoRule(f"the tensors of {', '.join(run.parameters)} are cut at other places in other layers")
            wanted = [shapes[name.format_map(each[0])][run.dim] for name in run.parameters]
            lengths = held.pop()
            if sum(lengths) != sum(wanted):
                continue
            for name, source in run.sources(lengths, wanted).items():
                number, _ = built[name]
                found[number] = found[number].model_copy(update={"source": SourceSpec.of(source)})
    return found
