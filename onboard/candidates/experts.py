"""Candidates for the container of the routed experts: which matrix is which, how its rows are ordered, and the gate."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, literal
from dayzero.onboard.candidates.expert_banks import Bank, Matrix
from dayzero.onboard.candidates.gates import activation_arguments, gate_arguments
from dayzero.onboard.candidates.nesting import Inner
from dayzero.runtime.nn.experts import Experts
from dayzero.runtime.weights import Concat, Deinterleave, Part, Source, Stack, Transpose, Unflatten


@dataclass(frozen=True)
class Layout:
    """parameters: of the container. experts, hidden, width: its sizes, each as evidence."""

    parameters: dict[str, Source]
    is_gated: bool
    bias: bool
    experts: Evidence
    hidden: Evidence
    width: Evidence


def propose_experts(inner: Inner, bank: Bank, hidden: int) -> list[Candidate]:
    """Candidates for "Experts" that read vectors of length `hidden`. inner: the module whose trace shows the gate."""
    found = []
    for layout in layouts(bank, hidden):
        for act in gate_arguments(inner) if layout.is_gated else activation_arguments(inner):
            arguments: dict[str, Evidence | Candidate] = {
                "experts": layout.experts,
                "hidden": layout.hidden,
                "width": layout.width,
                "act": act,
                "is_gated": literal(layout.is_gated, "the shapes"),
                "bias": literal(layout.bias, "the parameters"),
            }
            found.append(Candidate("Experts", arguments, layout.parameters))
    return found


def layouts(bank: Bank, hidden: int) -> Iterator[Layout]:
    """Every assignment of the bank's matrices that the shapes allow, rows as usual first."""
    if len(bank.matrices) == 2:
        for (first, last), is_gated in itertools.product(itertools.permutations(bank.matrices), (True, False)):
            yield from _of_two(bank, first, last, hidden, is_gated)
    if len(bank.matrices) == 3:
        for gate, up, down in itertools.permutations(bank.matrices):
            yield from _of_three(bank, gate, up, down, hidden)


def _of_two(bank: Bank, first: Matrix, last: Matrix, hidden: int, is_gated: bool) -> Iterator[Layout]:
    for joint, rows in _oriented(first, hidden, columns=True):
        if is_gated and rows % 2:
            continue
        width = rows // 2 if is_gated else rows
        for down, found in _oriented(last, hidden, columns=False):
            if found != width:
                continue
            biases = _biases(bank, rows, hidden)
            ends = {"down": _only_experts(bank, last, down), **({"down_bias": biases[1]} if biases else {})}
            into = _only_experts(bank, first, joint)
            for order in _orders(width) if is_gated else (None,):
                parameters = {("gate_up" if is_gated else "up"): order(into) if order else into, **ends}
                if biases:
                    parameters["in_bias"] = order(biases[0]) if order else biases[0]
                yield Layout(parameters, is_gated, bool(biases), *_sizes(bank, last, down))


def _of_three(bank: Bank, gate: Matrix, up: Matrix, down: Matrix, hidden: int) -> Iterator[Layout]:
    for (one, width), (two, other), (three, inner) in itertools.product(
        _oriented(gate, hidden, columns=True),
        _oriented(up, hidden, columns=True),
        _oriented(down, hidden, columns=False),
    ):
        if width == other == inner:
            parameters: dict[str, Source] = {"gate_up": Concat(1, (one, two)), "down": three}
            yield Layout(parameters, True, False, *_sizes(bank, down, three))


def _oriented(matrix: Matrix, hidden: int, *, columns: bool) -> Iterator[tuple[Source, int]]:
    """(source, the other size) of the orientations in which the columns, or the rows, are `hidden`."""
    for source, rows, held in (
        (matrix.source, matrix.rows, matrix.columns),
        (Transpose(matrix.source), matrix.columns, matrix.rows),
    ):
        if (held if columns else rows) == hidden:
            yield source, rows if columns else held


def _only_experts(bank: Bank, matrix: Matrix, source: Source) -> Source:
    """Without the rows of classes that have no expert."""
    return source if matrix.experts == bank.experts else Part(0, 0, bank.experts, source)


def _orders(width: int):
    """How gate and up stand in their joint matrix, as functions to gate rows first."""

    def swapped(source: Source) -> Source:
        return Concat(1, (Part(1, width, 2 * width, source), Part(1, 0, width, source)))

    yield lambda source: source
    yield lambda source: Deinterleave(1, 2, source)
    yield swapped
    yield lambda source: swapped(Deinterleave(1, 2, source))


def _biases(bank: Bank, rows: int, hidden: int) -> tuple[Source, Source] | None:
    first = [vector.source for vector in bank.vectors if vector.columns == rows]
    last = [vector.source for vector in bank.vectors if vector.columns == hidden and vector.source not in first[:1]]
    return (first[0], last[0]) if first and last and len(bank.vectors) == 2 else None


def _sizes(bank: Bank, matrix: Matrix, down: Source) -> tuple[Evidence, Evidence, Evidence]:
    """Evidence for the number of experts, the stream's and the inner width: the shape of the last matrix."""

    def shape_of(module: nn.Module) -> tuple[int, ...]:
        shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}
        if bank.counted_by:
            return recounted(down, shapes[bank.counted_by][0]).shape(shapes, {})
        if "{expert}" in matrix.name:
            count = next(n for n in itertools.count() if matrix.name.replace("{expert}", str(n)) not in shapes)
            return recounted(down, count).shape(shapes, {})
        return down.shape(shapes, {})

    label = f"shape of {matrix.name}"
    return (
        Evidence(
            f"{label}: experts",
            lambda module, config: shape_of(module)[0] if matrix.experts == bank.experts else bank.experts,
        ),
        Evidence(f"{label}: out", lambda module, config: shape_of(module)[1]),
        Evidence(f"{label}: in", lambda module, config: shape_of(module)[2]),
    )


def recounted(source: Source, experts: int) -> Source:
    """The expression for another number of experts whose rows stand in one flat matrix, or that are listed."""
    if isinstance(source, (Stack, Unflatten)):
        return replace(source, count=experts)
    return source.with_children(tuple(recounted(child, experts) for child in source.children))


def run_experts(block: Experts, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    """[T, hidden]: what the container's copies give, weighed and summed; classes without an expert give nothing."""
    flat = index.flatten()
    order = torch.argsort(flat, stable=True)
    order = order[flat[order] < block.experts]
    token = order // index.shape[1]
    with torch.no_grad():
        results = block(x[token], torch.bincount(flat[order], minlength=block.experts))
    return torch.zeros_like(x).index_add(0, token, results * weights.flatten()[order, None])
