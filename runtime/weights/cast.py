"""Values rounded to a narrower dtype on their way into the parameter."""

from dataclasses import dataclass, replace

import torch

from dayzero.runtime.weights.node import Node

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Cast(Node):
    """The part's values in `to`, a torch dtype's name. Without this node a parameter has the file's values unchanged.

    For quantised weights whose float32 values the reference rounds to bfloat16. Writing gives the values as they are:
    the file's own dtype decides.
    """

    to: str
    part: Node

    def shape(self, shapes, index):
        return self.part.shape(shapes, index)

    def dtype(self, reader, index):
        return DTYPES[self.to]

    def pieces(self, value, shapes, index, region):
        for piece in self.part.pieces(value, shapes, index, region):
            yield replace(piece, casts=(*piece.casts, DTYPES[self.to]))
