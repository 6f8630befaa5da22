"""One parameter that the checkpoint stores more than once."""

from dataclasses import dataclass

from dayzero.runtime.weights.node import Node, replace_role


@dataclass(frozen=True)
class Tie(Node):
    """The first part; the others hold the same values and get the same on writing. Reading compares them."""

    parts: tuple[Node, ...]

    def shape(self, shapes, index):
        found = [part.shape(shapes, index) for part in self.parts]
        if len(set(found)) != 1:
            names = [next(part.names(index)) for part in self.parts]
            raise ValueError(f"{' and '.join(names)} are tied but have different shapes: {found}")
        return found[0]

    def dtype(self, reader, index):
        return self.parts[0].dtype(reader, index)

    def pieces(self, value, shapes, index, region):
        yield from self.parts[0].pieces(value, shapes, index, region)
        for part in self.parts[1:]:
            for piece in part.pieces(value, shapes, index, region):
                yield replace_role(piece, "copy")
