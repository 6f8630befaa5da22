"""A checkpoint tensor as it is."""

from dataclasses import dataclass

from dayzero.runtime.weights.names import filled
from dayzero.runtime.weights.node import Leaf, Piece

CHUNK = 1 << 24  # bytes that are put into place at a time, so that a check of them needs no more


@dataclass(frozen=True)
class Stored(Leaf):
    """A checkpoint tensor as it is. `name` may hold index placeholders: `model.layers.{layer}.norm.weight`."""

    name: str

    def renamed(self, change):
        return Stored(change(self.name))

    def names(self, index):
        yield filled(self.name, index)

    def shape(self, shapes, index):
        return shapes[filled(self.name, index)]

    def dtype(self, reader, index):
        return reader.dtype(filled(self.name, index))

    def fill(self, piece: Piece, reader, shapes, put) -> int:
        data = reader.read(filled(self.name, piece.index), piece.region)
        if data.ndim == 0:
            put(piece.view, _cast(data, piece))
            return data.nbytes
        rows = max(1, CHUNK * len(data) // max(data.nbytes, 1))
        for start in range(0, len(data), rows):
            put(piece.view[start : start + rows], _cast(data[start : start + rows], piece))
        return data.nbytes


def _cast(data, piece: Piece):
    for dtype in piece.casts:
        data = data.to(dtype)
    return data
