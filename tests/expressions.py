"""Random weight expressions with the checkpoint tensors below them, for hypothesis."""

import itertools
import math
from dataclasses import dataclass, field

import torch
from hypothesis import strategies as st

from dayzero.runtime.weights import (
    BoundRule,
    Cast,
    Concat,
    Deinterleave,
    Flatten,
    Interleave,
    Part,
    Rule,
    Squeeze,
    Stack,
    Stored,
    Tie,
    Transpose,
    Trim,
    Unflatten,
    Unsqueeze,
    bind,
)

SIZE = st.integers(1, 4)
LAYER = 3


@dataclass
class Drawn:
    """stored: name -> (shape, counts of the stacks around it). rest: expressions for what `Part` left out.
    padded: name -> function that zeroes its padding; copies: name of a copy -> name of what it repeats."""

    stored: dict = field(default_factory=dict)
    rest: list = field(default_factory=list)
    padding: list = field(default_factory=list)
    copies: dict = field(default_factory=dict)
    counter: itertools.count = field(default_factory=itertools.count)


def divisors(size):
    return [n for n in range(1, size + 1) if size % n == 0]


@st.composite
def expressions(draw, drawn, shape=None, depth=4, stacked=None):
    """An expression with a result of this shape; what is below it is added to `drawn`."""
    shape = tuple(draw(st.lists(SIZE, min_size=1, max_size=3))) if shape is None else shape
    stacked = stacked or {}

    def inner(shape, **more):
        return draw(expressions(drawn, shape, depth - 1, more.get("stacked", stacked)))

    ones = tuple(dim for dim, size in enumerate(shape) if size == 1)
    kinds = ["stored"]
    if depth > 0:
        kinds += [
            "concat",
            "part",
            "trim",
            "interleave",
            "deinterleave",
            "unsqueeze",
            "cast",
            "flatten",
            "squeeze",
            "tie",
        ]
        kinds += ["transpose", "stack", "unflatten"] if len(shape) >= 2 else []
        kinds = [kind for kind in kinds if kind != "unsqueeze" or (ones and len(shape) > 1)]
    kind = draw(st.sampled_from(kinds))
    dim = draw(st.integers(0, len(shape) - 1))
    if kind == "stored":
        name = ".".join([f"t{next(drawn.counter)}", "{layer}", *(f"{{{index}}}" for index in stacked)])
        drawn.stored[name] = (shape, stacked)
        return Stored(name)
    if kind == "transpose":
        return Transpose(inner((*shape[:-2], shape[-1], shape[-2])))
    if kind == "stack":
        over = f"e{next(drawn.counter)}"
        return Stack(over, shape[0], inner(shape[1:], stacked={**stacked, over: shape[0]}))
    if kind == "concat":
        cuts = sorted(draw(st.sets(st.integers(1, shape[dim] - 1), max_size=2))) if shape[dim] > 1 else []
        ends = itertools.pairwise([0, *cuts, shape[dim]])
        return Concat(dim, tuple(inner((*shape[:dim], end - start, *shape[dim + 1 :])) for start, end in ends))
    if kind in ("interleave", "deinterleave"):
        block = draw(st.sampled_from(divisors(shape[dim])))
        ways = draw(st.sampled_from(divisors(block)))
        node = Interleave if kind == "interleave" else Deinterleave
        return node(dim, ways, inner(shape), block if block < shape[dim] or draw(st.booleans()) else None)
    if kind == "part":
        groups = draw(st.sampled_from(divisors(shape[dim])))
        width, before, after = shape[dim] // groups, draw(st.integers(0, 2)), draw(st.integers(0, 2))
        total = before + width + after
        below = inner((*shape[:dim], groups * total, *shape[dim + 1 :]))
        for start, stop in ((0, before), (before + width, total)):
            if start < stop:
                left = Part(dim, start, stop, below, groups)
                for over, count in reversed(stacked.items()):
                    left = Stack(over, count, left)
                drawn.rest.append(left)
        return Part(dim, before, before + width, below, groups)
    if kind == "trim":
        below = inner((*shape[:dim], shape[dim] + draw(st.integers(0, 2)), *shape[dim + 1 :]))
        made = Trim(dim, shape[dim], below)
        source = made
        for over, count in reversed(stacked.items()):
            source = Stack(over, count, source)
        drawn.padding.append(source)
        return made
    if kind == "unsqueeze":
        return Unsqueeze(ones[:1], inner(tuple(size for d, size in enumerate(shape) if d != ones[0])))
    if kind == "squeeze":
        return Squeeze((dim,), inner((*shape[:dim], 1, *shape[dim:])))
    if kind == "flatten":
        outer = draw(st.sampled_from(divisors(shape[dim])))
        return Flatten(dim, inner((*shape[:dim], outer, shape[dim] // outer, *shape[dim + 1 :])))
    if kind == "unflatten":
        dim = draw(st.integers(0, len(shape) - 2))
        return Unflatten(dim, shape[dim], inner((*shape[:dim], shape[dim] * shape[dim + 1], *shape[dim + 2 :])))
    if kind == "cast":
        return Cast("float32", inner(shape))
    before = len(drawn.rest), len(drawn.padding)
    one = inner(shape)
    if (len(drawn.rest), len(drawn.padding)) != before:
        return one  # what a copy leaves out would have to be left out twice
    suffix = f".copy{next(drawn.counter)}"
    other = one.renamed(lambda name: name + suffix)
    for name in _templates(one):
        drawn.stored[name + suffix] = drawn.stored[name]
        drawn.copies[name + suffix] = drawn.copies.get(name, name)
    return Tie((one, other))


def _templates(source):
    names = []
    source.renamed(lambda name: names.append(name) or name)
    return names


@dataclass
class Case:
    """rules by parameter; "p" is the drawn one, the others read what it leaves out. live: the values that belong to a
    parameter. tensors: distinct values everywhere, zeros in padding, copies alike."""

    rules: dict[str, BoundRule]
    tensors: dict[str, torch.Tensor]
    shapes: dict[str, tuple[int, ...]]
    live: set[int]

    @property
    def rule(self):
        return self.rules["p"]


@st.composite
def cases(draw, depth=4):
    """A `Case` of a random expression."""
    drawn = Drawn()
    source = draw(expressions(drawn, depth=depth))
    rules = [Rule("p.{layer}", source, {"layer": range(LAYER, LAYER + 1)})]
    rules += [Rule(f"rest{i}.{{layer}}", left, {"layer": range(LAYER, LAYER + 1)}) for i, left in enumerate(drawn.rest)]
    bound = {name.removesuffix(f".{LAYER}"): rule for name, rule in bind(rules).items()}
    tensors, value = {}, 1
    for name, (shape, stacked) in drawn.stored.items():
        for places in itertools.product(*map(range, stacked.values())):
            index = {"layer": LAYER, **dict(zip(stacked, places, strict=True))}
            if name in drawn.copies:
                tensors[name.format_map(index)] = tensors[drawn.copies[name].format_map(index)].clone()
                continue
            size = math.prod(shape)
            tensors[name.format_map(index)] = torch.arange(value, value + size).reshape(shape)
            value += size
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    padding = set()
    for trimmed in drawn.padding:
        rule = BoundRule("padding", trimmed, {"layer": LAYER})
        for piece in rule.pieces(torch.empty(rule.shape(shapes), device="meta"), shapes):
            if piece.role == "padding":
                name = next(piece.leaf.names(piece.index))
                padding |= set(tensors[name][piece.region].flatten().tolist())
    for tensor in tensors.values():
        for number in padding:
            tensor[tensor == number] = 0
    return Case(bound, tensors, shapes, set(range(1, value)) - padding)


def regions(shape, steps=False):
    """Random regions of a tensor, empty ones too."""
    bounds = [
        st.tuples(st.tuples(st.integers(0, size), st.integers(0, size)).map(sorted), st.integers(1, 3 if steps else 1))
        for size in shape
    ]
    return st.tuples(*bounds).map(
        lambda drawn: tuple(slice(a, b, step) if step > 1 else slice(a, b) for (a, b), step in drawn)
    )
