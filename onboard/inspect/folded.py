"""The tensors of a whole checkpoint by pattern."""

from collections.abc import Mapping
from dataclasses import dataclass

from dayzero.onboard.inspect.roles import joins_embeddings
from dayzero.onboard.inspect.tensor_names import Group, fold, split_layers
from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import TensorHeader, collector_paused

MOST_PATTERNS = 10_000  # a model's names repeat: the largest have a few hundred


@dataclass
class Folded:
    """The tensors of a checkpoint by pattern. mtp: numbers of layers that predict further tokens."""

    groups: list[Group]
    mtp: set[int]


def fold_checkpoint(headers: Mapping[str, TensorHeader]) -> Folded:
    """Groups by pattern, dtype and shape; layers that predict further tokens stand by themselves, since they are often
    numbered on after the last layer. Raises InputError for names that do not repeat as a model's do."""
    with collector_paused():
        groups = fold(headers)
        if len(groups) > MOST_PATTERNS:
            raise InputError(
                groups[0].names[0],
                found=f"one of {len(groups)} patterns of names in {len(headers)} tensors",
                expected=f"at most {MOST_PATTERNS} patterns, which layers and experts repeat",
            )
        mtp = {layer for group in groups if joins_embeddings(group.pattern) for layer in group.layers}
        return Folded(split_layers(groups, mtp, headers), mtp)
