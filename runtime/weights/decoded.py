"""A quantised weight: several checkpoint tensors that stand for one."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dayzero.runtime.quantisation import FORMATS, RoundTrip, decode_into, decoded_shape, encode
from dayzero.runtime.weights.names import filled
from dayzero.runtime.weights.node import Leaf, Piece, Reader, Region, whole


@dataclass(frozen=True)
class Decoded(Leaf):
    """The float32 values that a quantised weight stands for.

    format: a name of `dayzero.runtime.quantisation.FORMATS`. tensors: (role, name) of each stored tensor, the codes
    first; names may hold index placeholders. A region is decoded from the codes and scales that it covers.
    """

    format: str
    tensors: tuple[tuple[str, str], ...]

    def parts_of(self, index) -> dict[str, str]:
        """Role -> name of the stored tensor."""
        return {role: filled(name, index) for role, name in self.tensors}

    def renamed(self, change):
        return Decoded(self.format, tuple((role, change(name)) for role, name in self.tensors))

    def names(self, index):
        yield from self.parts_of(index).values()

    def shape(self, shapes, index):
        return decoded_shape(FORMATS[self.format], self._shapes(shapes, index))

    def dtype(self, reader, index):
        return torch.float32

    def fill(self, piece: Piece, reader, shapes, put) -> int:
        names = self.parts_of(piece.index)
        read = 0

        def read_part(role: str, region: Region) -> Tensor:
            nonlocal read
            data = reader.read(names[role], region)
            read += data.nbytes
            return data

        def put_cast(into: Tensor, data: Tensor) -> None:
            for dtype in piece.casts:
                data = data.to(dtype)
            put(into, data)

        decode_into(
            piece.view, FORMATS[self.format], read_part, self._shapes(shapes, piece.index), piece.region, put_cast
        )
        return read

    def encode(
        self, pieces: list[Piece], source: Reader, shapes: Mapping[str, tuple[int, ...]]
    ) -> tuple[Iterator[tuple[str, Region, Tensor]], RoundTrip]:
        """The stored tensors after the regions of `pieces` took new values: (name, its whole region, tensor), and what
        it cost. source: the stored tensors as they are; what no piece covers keeps their values."""
        index, casts = pieces[0].index, pieces[0].casts
        names = self.parts_of(index)
        like = {role: source.read(name) for role, name in names.items()}
        value = self.read(source, shapes, index, whole(self.shape(shapes, index)))
        for dtype in casts:
            value = value.to(dtype)
        value = value.to(torch.float32)
        for piece in pieces:
            value[piece.region] = piece.view.detach().to("cpu", torch.float32)
        rounded = min(casts, key=lambda dtype: dtype.itemsize, default=torch.float32)
        made, cost = encode(FORMATS[self.format], value, like, rounded)
        written = ((names[role], whole(tuple(tensor.shape)), tensor) for role, tensor in made.items())
        return written, cost

    def _shapes(self, shapes, index) -> dict[str, tuple[int, ...]]:
        return {role: tuple(shapes[name]) for role, name in self.parts_of(index).items()}
