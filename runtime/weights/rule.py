"""Rules: a parameter, the expression it is made of, and the index values that both stand for."""

import itertools
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from dayzero.runtime.quantisation import RoundTrip
from dayzero.runtime.weights.decoded import Decoded
from dayzero.runtime.weights.node import Node, Piece, Put, Reader, Region, Shape, Shapes, copy, whole


@dataclass(frozen=True)
class Rule:
    """`parameter` is made of `source`, for every combination of the values in `ranges` (placeholder -> range)."""

    parameter: str
    source: Node
    ranges: Mapping[str, Sequence[int]] = field(default_factory=dict)

    def each(self) -> Iterator[tuple[str, dict[str, int]]]:
        """(parameter name, index values) of every parameter that the rule stands for."""
        used = [name for _, name, _, _ in string.Formatter().parse(self.parameter) if name]
        for values in itertools.product(*(self.ranges[name] for name in used)):
            index = dict(zip(used, values, strict=True))
            yield self.parameter.format_map(index), index


@dataclass(frozen=True)
class BoundRule:
    """A rule for one parameter, with its index values filled in."""

    parameter: str
    source: Node
    index: Mapping[str, int]

    def names(self) -> list[str]:
        """Every checkpoint tensor that the parameter is made of, each once."""
        return list(dict.fromkeys(self.source.names(self.index)))

    def shape(self, shapes: Shapes) -> Shape:
        """Shape of the parameter. Raises ValueError if its tensors do not fit together, KeyError if one is missing."""
        return tuple(self.source.shape(shapes, self.index))

    def pieces(self, value: Tensor, shapes: Shapes, region: Region | None = None) -> Iterator[Piece]:
        """What the parameter, or a region of it, is made of. value: of the region's shape; views of it are returned."""
        return self.source.pieces(value, shapes, self.index, region or whole(self.shape(shapes)))

    def read(self, reader: Reader, shapes: Shapes, region: Region | None = None) -> Tensor:
        """The parameter, or a region of it, in the dtype that holds its tensors'. Raises ValueError for padding that
        is not zero, or tensors that should be equal and are not."""
        return self.source.read(reader, shapes, self.index, region or whole(self.shape(shapes)))

    def fill(self, into: Tensor, reader: Reader, shapes: Shapes, region: Region | None = None, put: Put = copy) -> int:
        """The same into a tensor of any dtype, a piece at a time: needs memory for one piece at most. Returns the
        bytes read. put(place, data) writes and may check."""
        return sum(piece.fill(reader, shapes, put) for piece in self.pieces(into, shapes, region))

    def write(
        self,
        value: Tensor,
        shapes: Shapes,
        region: Region | None = None,
        source: Reader | None = None,
        tell: Callable[[str, RoundTrip], None] = lambda name, cost: None,
    ) -> Iterator[tuple[str, Region, Tensor]]:
        """Inverse of read: which region of which checkpoint tensor holds which part of `value`.

        source: the checkpoint as it is, without which quantised tensors cannot be written: blocks that did not change
        keep their bytes. tell(name, cost): what writing a quantised tensor cost. Raises ValueError for one in a format
        that is only read, and where `source` is missing.
        """
        held: dict[tuple, list[Piece]] = {}
        for piece in self.pieces(value, shapes, region):
            name = next(piece.leaf.names(piece.index))
            if isinstance(piece.leaf, Decoded):
                held.setdefault((piece.leaf, name), []).append(piece)
                continue
            yield name, piece.region, piece.view
        for (leaf, name), pieces in held.items():
            if source is None:
                raise ValueError(f"{name} is stored as {leaf.format}; writing it needs the checkpoint as it is")
            written, cost = leaf.encode(pieces, source, shapes)
            tell(name, cost)
            yield from written


def bind(rules: Sequence[Rule]) -> dict[str, BoundRule]:
    """Parameter name -> its rule.

    Raises ValueError if two rules make the same parameter, or read the same tensor without each taking a part of it
    (`Part`); that these parts are disjoint and leave nothing out is what `check_coverage` sees to.
    """
    bound: dict[str, BoundRule] = {}
    owner: dict[str, tuple[str, int]] = {}
    for rule in rules:
        for parameter, index in rule.each():
            if parameter in bound:
                raise ValueError(f"two rules make {parameter}")
            bound[parameter] = BoundRule(parameter, rule.source, index)
            for leaf, inner, partial in rule.source.leaves(index):
                for name in leaf.names(inner):
                    if name in owner and not (partial and owner[name][1]):
                        raise ValueError(f"{name} is read for both {owner[name][0]} and {parameter}")
                    owner[name] = (parameter, partial)
    return bound
