"""Quantised weights of a checkpoint: which patterns belong together, and where the config says otherwise."""

import contextlib
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dayzero.onboard.inspect.ledger import Finding, TensorGroup, finding
from dayzero.onboard.inspect.tensor_names import Group
from dayzero.onboard.inspect.unread_layouts import unread_layouts
from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import TensorHeader
from dayzero.runtime.packed import QuantizedTensor, quantised_groups

_NARROW = {"F8_E4M3", "F8_E5M2", "F8_E8M0", "F4", "U8", "I8", "I32"}
_NEVER_QUANTISED = ("norm", "embedding", "head", "router", "stream", "decay", "convolution", "bias", "sink", "skip")


class _Samples(Mapping[str, TensorHeader]):
    """All headers by name, of which only some are listed: one of each group says what all of them are."""

    def __init__(self, headers: Mapping[str, TensorHeader], names: list[str]):
        self.headers, self.names = headers, names

    def __getitem__(self, name: str) -> TensorHeader:
        return self.headers[name]

    def __contains__(self, name: object) -> bool:
        return name in self.headers

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def packed_weights(
    folded: Sequence[Group], headers: Mapping[str, TensorHeader]
) -> tuple[list[QuantizedTensor | None], list[Finding]]:
    """For every group the quantised weight whose codes it holds, by its first tensor, None for the others; and a
    finding for scales that fit no weight."""
    made: list[QuantizedTensor | None] = []
    found = []
    for group in folded:
        weights: dict[str, QuantizedTensor] = {}
        if group.dtype in _NARROW:
            try:
                weights = quantised_groups(_Samples(headers, group.names[:1]))
            except InputError as error:
                found.append(finding("damage", f"{group.pattern} has scales that do not fit it", error.found))
        made.append(next(iter(weights.values()), None))
    return made, found


def disagreements(groups: Sequence[TensorGroup], quantization: Mapping[str, Any]) -> Iterator[Finding]:
    """Where the config's words about quantisation are not what the tensors are."""
    packed = [group for group in groups if group.format]
    lonely = [
        group
        for group in groups
        if group.dtype in _NARROW and group.format is None and group.part_of is None and len(group.shape) > 1
    ]
    known = unread_layouts({group.pattern: group for group in groups})
    for layout, patterns in known.items():
        yield finding("damage", f"weights are in a layout that is not read here: {layout}", ", ".join(_tails(patterns)))
    layouts = {pattern.rsplit(".", 1)[0] for patterns in known.values() for pattern in patterns}
    for group in (group for group in lonely if group.pattern.rsplit(".", 1)[0] not in layouts):
        line = f"{group.pattern} is {group.dtype} {group.shape}"
        yield finding("damage", "a tensor of packed numbers has no scales that are known here", line)
    method = quantization.get("quant_method", quantization.get("format"))
    if packed and not quantization:
        line = f"{packed[0].pattern} is {packed[0].format}"
        yield finding("contradiction", "weights are quantised, and no quantization_config says so", line)
    elif quantization and not packed:
        line = f"quant_method={method!r}, yet no tensor has a quantised format"
        yield finding("contradiction", "quantization_config describes tensors that are not there", line)
    if not packed:
        return
    listed = exceptions(quantization)
    exempt = Exceptions(listed)
    matrices = [group for group in groups if group.part_of is None and len(group.shape) >= 2 and _is_linear(group)]
    plain = [g.pattern for g in matrices if g.format is None and not exempt.hold(g.pattern)]
    if plain:
        yield finding(
            "contradiction" if listed else "note",
            f"{len(plain)} of the patterns are stored plain, and the config excepts "
            f"{'only others' if listed else 'nothing'} from quantisation",
            f"the tensors decide: {', '.join(_tails(plain))}",
        )
    both = [g.pattern for g in matrices if g.format is not None and exempt.hold(g.pattern)]
    if both:
        yield finding(
            "contradiction",
            f"{len(both)} of the patterns are quantised, and the config excepts them from it",
            f"the tensors decide: {', '.join(_tails(both))}",
        )


def exceptions(quantization: Mapping[str, Any]) -> list[str]:
    """The config's own list of modules that are not quantised, by any of its names."""
    for name in ("ignore", "modules_to_not_convert", "ignored_layers", "exclude_modules"):
        if isinstance(held := quantization.get(name), list):
            return [item for item in held if isinstance(item, str)]
    return []


def _is_linear(group: TensorGroup) -> bool:
    if not group.pattern.endswith("weight") and (group.role != "expert" or group.pattern.endswith("bias")):
        return False
    return group.part in {"text", "mtp"} and not any(word in group.role for word in _NEVER_QUANTISED)


def _tails(patterns: list[str]) -> list[str]:
    return sorted({pattern.split("{layer}.")[-1] for pattern in patterns})


class Exceptions:
    """A list of modules: full names, ends of names, names with `*`, or `re:` and an expression.

    An expression from a file could keep Python busy for years. So only plain ones are taken, text, choices and `.*`,
    and only a few that have a `.*` inside. Numbers are 0: lists are by kind, or name every layer.
    """

    def __init__(self, listed: list[str]):
        self.names: set[str] = set()
        self.expressions: list[re.Pattern[str]] = []
        stars = 0
        for item in listed:
            text = _expression(item)
            if text is None:
                self.names.add(re.sub(r"(?<=\.)\d+(?=\.|$)", "0", item[:_LONGEST]))
                continue
            stars += ".*" in text
            if len(self.expressions) < _MOST and (stars <= _MOST_STARS or ".*" not in text):
                with contextlib.suppress(re.error):
                    self.expressions.append(re.compile(text))

    def hold(self, pattern: str) -> bool:
        """Whether one of the modules is, or holds, the module of this pattern's tensors."""
        name = re.sub(r"\{\w+\}", "0", pattern)[:_LONGEST]
        pieces = name.split(".")
        runs = (".".join(pieces[a:b]) for a in range(len(pieces)) for b in range(a + 1, len(pieces) + 1))
        return any(run in self.names for run in runs) or any(made.search(name) for made in self.expressions)


_LONGEST, _MOST, _MOST_STARS = 200, 100, 8
_PLAIN = re.compile(r"(?:\.\*|\\?\.|[\w^$-]|\([\w|]*\))*")


def _expression(item: str) -> str | None:
    """A list's entry as an expression to search for, one that never matches if it is not plain; None for a name."""
    if item.startswith("re:"):
        text = item[3:].removeprefix(".*").removesuffix(".*")
        return text if len(text) <= _LONGEST and _PLAIN.fullmatch(text) and text.count("*") <= 1 else "(?!)"
    if "*" in item:
        text = ".*".join(map(re.escape, item.strip("*").split("*")))
        return text if len(text) <= 2 * _LONGEST and text.count(".*") <= 1 else "(?!)"
    return None
