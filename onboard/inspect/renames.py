"""Names that changed alike between two releases: a prefix, or one component, that all tensors below it follow."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from dayzero.onboard.inspect.tensor_names import Group

_LOOKED_AT = 200  # patterns of each side, the largest first: a change of all names shows in them
_MOST, _TRIED = 20, 50  # renames that are found, and tried for one; more are no releases of one model


class Rename(NamedTuple):
    """before, after: what stands in the names. prefix: at their beginning, the last dot included; else as components,
    the first time that they occur."""

    before: str
    after: str
    prefix: bool

    def apply(self, name: str) -> str | None:
        """The new name, None where this has no part of it."""
        if self.prefix:
            return self.after + name[len(self.before) :] if name.startswith(self.before) else None
        old, new = f".{self.before}.", f".{self.after}."
        dotted = f".{name}."
        return dotted.replace(old, new, 1)[1:-1] if old in dotted else None


def find_renames(removed: Sequence[Group], added: Sequence[Group]) -> list[tuple[Rename, dict[str, str]]]:
    """(rename, old name -> new name) for the changes of name that explain most of the tensors they apply to.

    removed, added: by pattern, of names that only one side has. A pattern that two renames could explain as well is
    left alone: `a` and `b` of one shape that became `x` and `y` do not tell which is which.
    """
    gone, new = _by_pattern(removed), _by_pattern(added)
    renames: list[tuple[Rename, dict[str, str]]] = []
    while len(renames) < _MOST:
        made = _best(gone, new)
        if made is None:
            return renames
        rename, pairs = made
        mapped: dict[str, str] = {}
        for old, other in pairs:
            there = {name for group in new[other] for name in group.names}
            for group in gone[old]:
                for name in group.names:
                    target = rename.apply(name)
                    if target in there:
                        mapped[name] = target
        if not mapped:
            return renames
        renames.append((rename, mapped))
        for old, other in pairs:
            del gone[old]
            new.pop(other, None)
    return renames


def _by_pattern(groups: Sequence[Group]) -> dict[str, list[Group]]:
    """The largest patterns, each with its groups, of which there are several where shapes or dtypes differ."""
    held: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        held[group.pattern].append(group)
    largest = sorted(held, key=lambda pattern: -sum(len(group.names) for group in held[pattern]))
    return {pattern: held[pattern] for pattern in largest[:_LOOKED_AT]}


def _best(
    gone: Mapping[str, list[Group]], new: Mapping[str, list[Group]]
) -> tuple[Rename, list[tuple[str, str]]] | None:
    """The rename that makes most patterns of the one side patterns of the other, and those; None for none.

    What as many or more patterns speak for, and would make something else of one of these, is a rival: then neither is.
    """
    votes: dict[Rename, int] = Counter()
    from_old: dict[str, list[tuple[str, Rename]]] = defaultdict(list)
    to_new: dict[str, list[tuple[str, Rename]]] = defaultdict(list)
    kinds = {pattern: {(group.dtype, group.shape) for group in groups} for pattern, groups in new.items()}
    for old, groups in gone.items():
        held = {(group.dtype, group.shape) for group in groups}
        for other in new:
            made = _between(old, other) if held & kinds[other] else None
            if made is not None:
                votes[made] += 1
                from_old[old].append((other, made))
                to_new[other].append((old, made))
    for rename in sorted(votes, key=lambda rename: (-votes[rename], not rename.prefix, rename))[:_TRIED]:
        pairs = [(old, target) for old in gone if (target := rename.apply(old)) is not None and target in new]
        applies = sum(rename.apply(old) is not None for old in gone)
        rivals = (
            votes[rival] >= votes[rename]
            for old, target in pairs
            for end, held in ((target, from_old[old]), (old, to_new[target]))
            for other, rival in held
            if other != end
        )
        if 2 * len(pairs) > applies and not any(rivals):
            return rename, pairs
    return None


def _between(old: str, new: str) -> Rename | None:
    """What would make one pattern of the other: the parts between their common beginning and end."""
    one, two = old.split("."), new.split(".")
    shortest = min(len(one), len(two))
    start = next((n for n in range(shortest) if one[n] != two[n]), shortest)
    end = next((n for n in range(shortest - start) if one[-1 - n] != two[-1 - n]), shortest - start)
    if not end:
        return None
    prefix = not any("{" in piece for piece in one[:start])
    if start in (len(one) - end, len(two) - end):  # nothing stands there on one side: what is beside it tells where
        start, end = (0, end) if prefix else (start, end - 1)
    else:
        prefix = start == 0
    before, after = one[start : len(one) - end], two[start : len(two) - end]
    if not end or any("{" in piece for piece in (*before, *after)):
        return None
    if prefix:
        return Rename("".join(f"{piece}." for piece in before), "".join(f"{piece}." for piece in after), True)
    return Rename(".".join(before), ".".join(after), False)
