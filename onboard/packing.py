"""Quantised weights of a checkpoint: which patterns belong together, and where the config says otherwise."""

import fnmatch
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from dayzero.onboard.ledger import Finding, TensorGroup, finding
from dayzero.onboard.tensor_names import Group
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
    for group in lonely:
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
    exempt = [_matcher(item) for item in listed[:10_000]]
    matrices = [group for group in groups if group.part_of is None and len(group.shape) >= 2 and _is_linear(group)]
    plain = [g.pattern for g in matrices if g.format is None and not _any(exempt, g.pattern)]
    if plain:
        yield finding(
            "contradiction" if listed else "note",
            f"{len(plain)} of the patterns are stored plain, and the config excepts "
            f"{'only others' if listed else 'nothing'} from quantisation",
            f"the tensors decide: {', '.join(_tails(plain))}",
        )
    both = [g.pattern for g in matrices if g.format is not None and _any(exempt, g.pattern)]
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


def _any(matchers: list[re.Pattern[str]], pattern: str) -> bool:
    """Whether one of the modules on the list holds this pattern's tensors. Numbers are 0: lists are by kind, or name
    every layer."""
    name = re.sub(r"\{\w+\}", "0", pattern)
    return any(matcher.search(name) for matcher in matchers)


def _matcher(item: str) -> re.Pattern[str]:
    """What a list's entry means: `re:` and an expression, a name with `*`, or the end of a module's name.

    An expression from a file could keep Python busy for years, so only plain ones are taken: text, `.*` and choices.
    """
    never = re.compile(r"(?!)")
    if len(item) > 200:
        return never
    if item.startswith("re:"):
        text = item[3:]
        plain = re.fullmatch(r"(\.\*|\\?\.|[\w\-^$]|\([\w|]*\))*", text) is not None
        return re.compile(text) if plain and text.count("*") <= 3 else never
    if "*" in item:
        return re.compile(fnmatch.translate(item).removesuffix(r"\Z")) if item.count("*") <= 3 else never
    item = re.sub(r"(?<=\.)\d+(?=\.|$)", "0", item)
    return re.compile(rf"(^|\.){re.escape(item)}(\.|$)")
