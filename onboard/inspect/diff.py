"""Two checkpoints side by side: what changed between two releases of a model."""

import hashlib
from collections.abc import Iterable, Mapping, Set
from pathlib import Path
from typing import Any

from dayzero.onboard.checkpoint import TOKENIZER_FILES, Checkpoint
from dayzero.onboard.inspect.ledger import Ledger
from dayzero.onboard.inspect.renames import find_renames
from dayzero.onboard.inspect.tensor_names import Group, fold, ranges
from dayzero.runtime.headers import TensorHeader, collector_paused
from dayzero.runtime.record import Record
from dayzero.runtime.shards import check_inside


class Change(Record):
    """Tensors of one pattern that are new, gone, or not what they were. before, after: `BF16 [96, 7168]`, "" for
    none."""

    pattern: str
    count: int
    layers: str
    experts: str
    before: str
    after: str


class Renamed(Record):
    """Tensors whose names changed alike and that are otherwise the same. before, after: `model.`,
    `language_model.model.` where prefix, else components of the names. patterns: of the first checkpoint's names."""

    before: str
    after: str
    prefix: bool
    count: int
    patterns: list[str]


class Diff(Record):
    """What a second checkpoint has that a first has not, and the other way round.

    totals: name -> (before, after), of what differs. changed: other shape or dtype. renamed: under another name; what
    has changed besides is in `changed`, under the second checkpoint's name. moved: tensors that are the same but in
    another file. config: field -> (before, after), None for absent. files: tokenizer, generation config and remote
    code -> `added`, `removed` or `changed`.
    """

    totals: dict[str, tuple[Any, Any]]
    added: list[Change]
    removed: list[Change]
    changed: list[Change]
    renamed: list[Renamed]
    moved: int
    config: dict[str, tuple[Any, Any]]
    files: dict[str, str]

    @property
    def same(self) -> bool:
        """Nothing differs that a model could notice."""
        return not (self.added or self.removed or self.changed or self.renamed or self.config or self.files)


def diff_checkpoints(one: Checkpoint, two: Checkpoint, ledgers: tuple[Ledger, Ledger]) -> Diff:
    """From the first to the second. Only files beside the tensors are compared by content."""
    before, after = one.headers, two.headers
    with collector_paused():
        both = before.keys() & after.keys()
        different = [name for name in both if before[name][:2] != after[name][:2]]
        moved = sum(before[name][2] != after[name][2] for name in both)
        renamed, origin = _renamed(before, after, before.keys() - both, after.keys() - both)
        added = _changes(after, after.keys() - both - origin.keys(), "", None)
        removed = _changes(before, before.keys() - both - set(origin.values()), None, "")
    different += [name for name, old in origin.items() if before[old][:2] != after[name][:2]]
    pairs: dict[str, dict[str, TensorHeader]] = {}
    for name in different:
        pairs.setdefault(_what(after[name]), {})[name] = before[origin.get(name, name)]
    changed = [change for what, headers in pairs.items() for change in _changes(headers, headers, None, what)]
    return Diff(
        totals=_totals(*ledgers),
        added=added,
        removed=removed,
        changed=sorted(changed, key=lambda change: (change.pattern, change.layers)),
        renamed=renamed,
        moved=moved,
        config=_config(one.config, two.config),
        files=_files(one, two),
    )


def _renamed(
    before: Mapping[str, TensorHeader], after: Mapping[str, TensorHeader], removed: Set[str], added: Set[str]
) -> tuple[list[Renamed], dict[str, str]]:
    """The renames, and new name -> old name of all tensors that they are about."""
    if not removed or not added:
        return [], {}
    groups = [
        fold({name: headers[name] for name in sorted(names)}) for headers, names in ((before, removed), (after, added))
    ]
    found, origin = [], {}
    for rename, pairs in find_renames(*groups):
        same = [old for old, new in pairs.items() if before[old][:2] == after[new][:2]]
        patterns = {group.pattern for group in fold({name: before[name] for name in same})}
        if same:
            made = Renamed(**rename._asdict(), count=len(same), patterns=sorted(patterns))
            found.append(made)
        origin |= {new: old for old, new in pairs.items()}
    return found, origin


def _what(header: TensorHeader | Group) -> str:
    return f"{header.dtype} {list(header.shape)}"


def _changes(
    headers: Mapping[str, TensorHeader], names: Iterable[str], before: str | None, after: str | None
) -> list[Change]:
    """None: what the tensors are in `headers`."""
    return [
        Change(
            pattern=group.pattern,
            count=len(group.names),
            layers=ranges(group.layers),
            experts=ranges(group.experts),
            before=_what(group) if before is None else before,
            after=_what(group) if after is None else after,
        )
        for group in fold({name: headers[name] for name in sorted(names)})
    ]


def _totals(one: Ledger, two: Ledger) -> dict[str, tuple[Any, Any]]:
    def held(ledger: Ledger) -> dict[str, Any]:
        layers = {f"{part} layers": kinds for part, kinds in ledger.layer_counts().items()}
        experts = {f"experts: {name}": value for name, value in ledger.experts.model_dump().items()}
        names = ("parameters", "tensors", "bytes", "tied", "mtp")
        return {**{name: getattr(ledger, name) for name in names}, **layers, **experts, "formats": ledger.formats()}

    before, after = held(one), held(two)
    return {name: (before[name], after[name]) for name in before if before[name] != after[name]}


def _config(one: Mapping[str, Any], two: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    before, after = dict(_flat(one)), dict(_flat(two))
    names = sorted(before.keys() | after.keys())
    return {n: (before.get(n), after.get(n)) for n in names if repr(before.get(n)) != repr(after.get(n))}


def _flat(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _files(one: Checkpoint, two: Checkpoint) -> dict[str, str]:
    names = sorted({*TOKENIZER_FILES, "generation_config.json", *one.remote_code, *two.remote_code})
    found = {}
    for name in names:
        before, after = _digest(one.path, name), _digest(two.path, name)
        if before != after:
            found[name] = "added" if before is None else "removed" if after is None else "changed"
    return found


def _digest(folder: Path, name: str) -> str | None:
    if not (folder / name).is_file():
        return None
    check_inside(folder, name)
    with (folder / name).open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()
