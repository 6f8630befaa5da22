"""Weight rules: where each parameter of the model comes from in the checkpoint, readable in both directions.

A rule names a parameter and an expression over checkpoint tensors. An expression says, for every region of the
parameter, which region of which stored tensor it is (`Node.pieces`): reading fills the parameter from there, writing
gives the stored tensors back under their own names and shapes, and only the bytes that are needed are touched. Names
may hold `{layer}` and `{expert}`, or a number that follows from them (`names.py`); a rule stands for all values of its
ranges.
"""

from dayzero.runtime.weights.cast import Cast
from dayzero.runtime.weights.coverage import check_coverage
from dayzero.runtime.weights.decoded import Decoded
from dayzero.runtime.weights.join import Concat, Stack
from dayzero.runtime.weights.node import Node, Piece, Reader, Region, Shape, whole
from dayzero.runtime.weights.order import Deinterleave, Interleave
from dayzero.runtime.weights.part import Excerpt, Part, Trim
from dayzero.runtime.weights.reshape import Flatten, Squeeze, Transpose, Unflatten, Unsqueeze
from dayzero.runtime.weights.rule import BoundRule, Rule, bind
from dayzero.runtime.weights.stored import Stored
from dayzero.runtime.weights.tie import Tie

Source = Node
NODES: dict[str, type[Node]] = {
    "stored": Stored,
    "decoded": Decoded,
    "stack": Stack,
    "concat": Concat,
    "transpose": Transpose,
    "flatten": Flatten,
    "unflatten": Unflatten,
    "squeeze": Squeeze,
    "unsqueeze": Unsqueeze,
    "part": Part,
    "excerpt": Excerpt,
    "trim": Trim,
    "interleave": Interleave,
    "deinterleave": Deinterleave,
    "cast": Cast,
    "tie": Tie,
}

__all__ = [
    "NODES",
    "BoundRule",
    "Cast",
    "Concat",
    "Decoded",
    "Deinterleave",
    "Excerpt",
    "Flatten",
    "Interleave",
    "Node",
    "Part",
    "Piece",
    "Reader",
    "Region",
    "Rule",
    "Shape",
    "Source",
    "Squeeze",
    "Stack",
    "Stored",
    "Tie",
    "Transpose",
    "Trim",
    "Unflatten",
    "Unsqueeze",
    "bind",
    "check_coverage",
    "whole",
]
