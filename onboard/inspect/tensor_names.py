"""Folds tensor names into patterns: `model.layers.{layer}.mlp.experts.{expert}.w1.weight` for thousands of tensors."""

import itertools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod

from dayzero.runtime.headers import TensorHeader

_NUMBER = re.compile(r"(?<=[._])(?:0|[1-9][0-9]{0,8})(?=[._]|$)")
_WORD_BEFORE = re.compile(r"([A-Za-z]*)s?[._]$")
_LAYER_WORDS = {"layer", "layers", "block", "blocks", "h", "mtp", "nextn", "decoder", "transformer"}
_HOLE = "#"  # stands for a number while names are split; no tensor name has it


@dataclass
class Group:
    """Tensors of one pattern, dtype and shape. placeholders: the names in the pattern, in order. numbers: for every
    tensor of `names`, what stands for them. layers, experts: the different ones of these, sorted. bytes: of all."""

    pattern: str
    dtype: str
    shape: tuple[int, ...]
    names: list[str]
    layers: list[int]
    experts: list[int]
    bytes: int
    placeholders: tuple[str, ...] = ()
    numbers: list[tuple[int, ...]] = field(default_factory=list)

    def values(self, placeholder: int) -> list[int]:
        """The different numbers of one placeholder, by its position, sorted."""
        return sorted({numbers[placeholder] for numbers in self.numbers})

    def missing(self) -> list[str]:
        """Names that the ranges promise and that are not there: expert 5 of layer 7, where all others have one."""
        columns = [self.values(position) for position in range(len(self.placeholders))]
        if prod(map(len, columns)) == len(self.names):
            return []
        there, lacking = set(self.numbers), []
        for numbers in _each(columns):
            if numbers not in there:
                lacking.append(fill(self.pattern, numbers))
                if len(lacking) == 1000:  # more says nothing new
                    break
        return lacking


def _each(columns: list[list[int]]) -> Iterable[tuple[int, ...]]:
    """Every combination, lazily even where there are very many."""
    if not columns:
        yield ()
        return
    for first in columns[0]:
        for rest in _each(columns[1:]):
            yield (first, *rest)


def fill(pattern: str, numbers: Iterable[int]) -> str:
    """The name that a pattern and its numbers make."""
    parts = iter(numbers)
    return re.sub(r"\{\w+\}", lambda match: str(next(parts)), pattern)


def pattern_of(name: str) -> tuple[str, tuple[int, ...]]:
    """The pattern of a name, and the numbers that it left out.

    >>> pattern_of("model.layers.7.mlp.experts.12.w1.weight")
    ('model.layers.{layer}.mlp.experts.{expert}.w1.weight', (7, 12))
    """
    split, numbers = _split(name)
    return _named(split)[0], numbers


def _split(text: str) -> tuple[str, tuple[int, ...]]:
    return _NUMBER.sub(_HOLE, text), tuple(map(int, _NUMBER.findall(text)))


def _named(split: str) -> tuple[str, tuple[str, ...]]:
    """The pattern and its placeholders. A number is an expert's after that word, a layer's after a word for layers or
    where at least two parts of the name follow; what is neither is a `part`."""
    pieces = split.split(_HOLE)
    made, names = pieces[0], []
    for before, after in itertools.pairwise(pieces):
        match = _WORD_BEFORE.search(before)
        word = match.group(1).lower() if match else ""
        if word.rstrip("s") == "expert" and "expert" not in names:
            name = "expert"
        elif "layer" not in names and (word in _LAYER_WORDS or after.count(".") > 1 or (not after and not names)):
            name = "layer"
        else:
            others = sum(name not in {"layer", "expert"} for name in names)
            name = ("part", "index")[others] if others < 2 else f"index{others}"
        names.append(name)
        made += f"{{{name}}}{after}"
    return made, tuple(names)


def fold(headers: Mapping[str, TensorHeader]) -> list[Group]:
    """Groups in the order of their patterns."""
    held: dict[tuple, tuple[list[str], list[tuple[int, ...]]]] = {}
    heads: dict[str, tuple[str, tuple[int, ...]]] = {}
    tails: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, header in headers.items():
        # A name is cut before its third dot from the end, because both halves recur: hundreds of thousands of names
        # are made of a few thousand.
        start = name.rsplit(".", 3)[0]
        rest = name[len(start) :]
        head = heads.get(start)
        if head is None:
            head = heads[start] = _split(start)
        tail = tails.get(rest)
        if tail is None:
            tail = tails[rest] = _split(rest)
        key = (head[0], tail[0], header[0], header[1])
        group = held.get(key)
        if group is None:
            group = held[key] = ([], [])
        group[0].append(name)
        group[1].append(head[1] + tail[1])
    merged: dict[tuple, Group] = {}
    for (head_text, tail_text, dtype, shape), (names, numbers) in held.items():
        pattern, placeholders = _named(head_text + tail_text)
        group = merged.get((pattern, dtype, shape))
        if group is None:
            group = merged[pattern, dtype, shape] = Group(pattern, dtype, shape, [], [], [], 0, placeholders)
        group.names += names
        group.numbers += numbers
    for group in merged.values():
        complete(group, headers)
    return [merged[key] for key in sorted(merged, key=lambda key: (key[0], key[1], key[2]))]


def complete(group: Group, headers: Mapping[str, TensorHeader]) -> Group:
    """Fills in what follows from names and numbers."""
    group.bytes = len(group.names) * headers[group.names[0]].bytes
    for attribute in ("layer", "expert"):
        if attribute in group.placeholders:
            setattr(group, f"{attribute}s", group.values(group.placeholders.index(attribute)))
    return group


def split_layers(groups: list[Group], layers: set[int], headers: Mapping[str, TensorHeader]) -> list[Group]:
    """The groups, those that are partly of these layers parted in two."""
    made = []
    for group in groups:
        inside = layers & set(group.layers)
        if not inside or inside == set(group.layers):
            made.append(group)
            continue
        where = group.placeholders.index("layer")
        for chosen in (False, True):
            rows = [row for row, numbers in enumerate(group.numbers) if (numbers[where] in inside) == chosen]
            made.append(subset(group, rows, headers))
    return made


def subset(group: Group, rows: list[int], headers: Mapping[str, TensorHeader]) -> Group:
    """The group of these of its tensors, by their places in `names`."""
    names, numbers = [group.names[row] for row in rows], [group.numbers[row] for row in rows]
    part = Group(group.pattern, group.dtype, group.shape, names, [], [], 0, group.placeholders, numbers)
    return complete(part, headers)


def ranges(numbers: Iterable[int]) -> str:
    """`0-2, 5, 7-9` for sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)


def stepped(numbers: list[int]) -> str:
    """Sorted numbers for people, as short as it gets: `3-91 by 4, 92`, `0-90 except 3-87 by 4`."""
    plain = _with_steps(numbers)
    if len(numbers) < 3:
        return plain
    there = set(numbers)
    span = numbers[-1] - numbers[0] + 1
    if span > 2 * len(numbers):
        return plain
    gaps = [number for number in range(numbers[0], numbers[-1]) if number not in there]
    if not gaps:
        return plain
    other = f"{numbers[0]}-{numbers[-1]} except {_with_steps(gaps)}"
    return other if len(other) < len(plain) else plain


def _with_steps(numbers: list[int]) -> str:
    parts, at = [], 0
    while at < len(numbers):
        end = at + 1
        step = numbers[end] - numbers[at] if end < len(numbers) else 0
        while end + 1 < len(numbers) and numbers[end + 1] - numbers[end] == step:
            end += 1
        if step == 1 or end - at >= 3 or (end - at == 2 and end + 1 == len(numbers)):
            parts.append(f"{numbers[at]}-{numbers[end]}" + (f" by {step}" if step != 1 else ""))
            at = end + 1
        else:
            parts.append(str(numbers[at]))
            at += 1
    return ", ".join(parts)


def counted(text: str) -> list[int]:
    """The numbers of `ranges`' text."""
    found = []
    for part in filter(None, text.split(", ")):
        low, _, high = part.partition("-")
        found.extend(range(int(low), int(high or low) + 1))
    return found
