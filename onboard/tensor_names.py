"""Folds tensor names into patterns: `model.layers.{layer}.mlp.experts.{expert}.w1.weight` for thousands of tensors."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from dayzero.runtime.headers import TensorHeader

_NUMBER = re.compile(r"(?<=[._])[0-9]+(?=[._]|$)")
PLACEHOLDERS = ("layer", "expert", "part")  # the first, second and third number of a name


@dataclass
class Group:
    """Tensors of one pattern, dtype and shape. layers, experts: the numbers that stand for the placeholders, sorted."""

    pattern: str
    dtype: str
    shape: tuple[int, ...]
    names: list[str]
    layers: list[int]
    experts: list[int]
    bytes: int


def pattern_of(name: str) -> tuple[str, tuple[int, ...]]:
    """The pattern of a name, and the numbers that it left out.

    >>> pattern_of("model.layers.7.mlp.experts.12.w1.weight")
    ('model.layers.{layer}.mlp.experts.{expert}.w1.weight', (7, 12))
    """
    numbers = tuple(int(match.group()) for match in _NUMBER.finditer(name))
    placeholders = iter(PLACEHOLDERS)
    return _NUMBER.sub(lambda match: "{" + next(placeholders, "index") + "}", name), numbers


def fold(headers: Mapping[str, TensorHeader]) -> list[Group]:
    """Groups in the order of their patterns."""
    groups: dict[tuple, Group] = {}
    for name, header in headers.items():
        pattern, numbers = pattern_of(name)
        key = (pattern, header.dtype, header.shape)
        group = groups.get(key)
        if group is None:
            group = groups[key] = Group(pattern, header.dtype, header.shape, [], [], [], 0)
        group.names.append(name)
        group.bytes += header.bytes
        if numbers:
            group.layers.append(numbers[0])
        if len(numbers) > 1:
            group.experts.append(numbers[1])
    for group in groups.values():
        group.layers, group.experts = sorted(set(group.layers)), sorted(set(group.experts))
    return [groups[key] for key in sorted(groups, key=str)]


def ranges(numbers: Iterable[int]) -> str:
    """`0-2, 5, 7-9` for sorted numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ", ".join(str(low) if low == high else f"{low}-{high}" for low, high in runs)
