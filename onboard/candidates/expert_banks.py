"""Where the matrices of a layer's experts are, in whatever layout: stacked, listed, flat, or rows of tables."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from dayzero.onboard.candidates.evidence import Site
from dayzero.runtime.weights import Source, Stack, Stored, Unflatten, Unsqueeze


@dataclass(frozen=True)
class Matrix:
    """[E, rows, columns] of all experts. source: over the module's parameters. name: of the parameter, or of a pattern
    over the experts."""

    name: str
    source: Source
    rows: int
    columns: int
    experts: int


@dataclass(frozen=True)
class Bank:
    """owner: path of the module that holds the experts. vectors: [E, length] as matrices of one row. counted_by: for
    flat matrices, the parameter whose rows are as many as there are experts."""

    owner: str
    experts: int
    matrices: tuple[Matrix, ...]
    vectors: tuple[Matrix, ...]
    parameters: frozenset[str]
    counted_by: str = ""


def banks(site: Site) -> list[Bank]:
    """Every bank below the module, the one with most experts first."""
    found = [*_stacked(site), *_listed(site), *_apart(site), *_flat(site), *_tables(site)]
    return sorted(found, key=lambda bank: -bank.experts)


def _stacked(site: Site) -> Iterator[Bank]:
    """A module with two or more parameters of three dimensions. Some may have rows of classes that have no expert."""
    for path, module in site.module.named_modules():
        own = {name: p for name, p in module.named_parameters(recurse=False) if min(p.shape, default=0) > 0}
        stacks = {name: p for name, p in own.items() if p.ndim == 3}
        if len(stacks) < 2 or _is_convolution(module):
            continue
        experts = min(p.shape[0] for p in stacks.values())
        prefix = f"{path}." if path else ""
        vectors = {name: p for name, p in own.items() if p.ndim == 2 and p.shape[0] == experts}
        yield Bank(
            path,
            experts,
            tuple(
                Matrix(prefix + n, Stored(prefix + n), p.shape[1], p.shape[2], p.shape[0]) for n, p in stacks.items()
            ),
            tuple(Matrix(prefix + n, Stored(prefix + n), 1, p.shape[1], experts) for n, p in vectors.items()),
            frozenset(prefix + name for name in [*stacks, *vectors]),
        )


def _is_convolution(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.conv._ConvNd)


def _listed(site: Site) -> Iterator[Bank]:
    """A module whose children are two or more small networks of one shape, numbered in their names."""
    for path, module in site.module.named_modules():
        children = [(name, child) for name, child in module.named_children() if any(True for _ in child.parameters())]
        shapes = [tuple((n, tuple(p.shape)) for n, p in child.named_parameters()) for _, child in children]
        names = [re.fullmatch(r"(\D*)(\d+)(\D*)", name) for name, _ in children]
        numbered = [match for match in names if match is not None]
        alike = len(children) > 1 and len(set(shapes)) == 1 and 1 < len(shapes[0]) <= 6
        if not alike or [int(match[2]) for match in numbered] != list(range(len(children))):
            continue
        prefix = f"{path}." if path else ""
        pattern = f"{prefix}{numbered[0][1]}{{expert}}{numbered[0][3]}."
        count = len(children)
        made = {
            name: Matrix(pattern + name, Stack("expert", count, Stored(pattern + name)), *_two(shape), count)
            for name, shape in shapes[0]
            if len(shape) <= 2
        }
        yield Bank(
            path,
            count,
            tuple(matrix for name, matrix in made.items() if len(dict(shapes[0])[name]) == 2),
            tuple(matrix for name, matrix in made.items() if len(dict(shapes[0])[name]) == 1),
            frozenset(f"{prefix}{child}.{name}" for child, _ in children for name, _ in shapes[0]),
        )


def _two(shape: tuple[int, ...]) -> tuple[int, int]:
    return (shape[0], shape[1]) if len(shape) == 2 else (1, shape[0])


def _apart(site: Site) -> Iterator[Bank]:
    """Two modules side by side with one parameter of three dimensions each."""
    for path, module in site.module.named_modules():
        prefix = f"{path}." if path else ""
        single = [
            (f"{prefix}{child}.{name}", p)
            for child, held in module.named_children()
            for name, p in held.named_parameters()
            if len(list(held.parameters())) == 1 and p.ndim == 3 and not _is_convolution(held)
        ]
        if len(single) > 1 and len({p.shape[0] for _, p in single}) == 1:
            matrices = tuple(Matrix(name, Stored(name), p.shape[1], p.shape[2], p.shape[0]) for name, p in single)
            yield Bank(path, matrices[0].experts, matrices, (), frozenset(name for name, _ in single))


def _flat(site: Site) -> Iterator[Bank]:
    """Two or three parameters [E * rows, columns] of one module, where some other matrix of the site has E rows."""
    counts = {p.shape[0]: name for name, p in site.module.named_parameters() if p.ndim == 2}
    for path, module in site.module.named_modules():
        own = {name: p for name, p in module.named_parameters(recurse=False) if p.ndim == 2}
        if len(own) not in {2, 3} or len({p.shape for p in own.values()}) != 1:
            continue
        prefix = f"{path}." if path else ""
        rows, columns = next(iter(own.values())).shape
        for experts in sorted((count for count in counts if count > 1 and rows % count == 0), reverse=True):
            if experts == rows:
                continue
            matrices = tuple(
                Matrix(prefix + name, Unflatten(0, experts, Stored(prefix + name)), rows // experts, columns, experts)
                for name in own
            )
            names = frozenset(prefix + name for name in own)
            yield Bank(path, experts, matrices, (), names, counted_by=counts[experts])


def _tables(site: Site) -> Iterator[Bank]:
    """Tables [E, columns] side by side, a row of each an expert of width one: vectors in and out."""
    for path, module in site.module.named_modules():
        prefix = f"{path}." if path else ""
        tables = [(name, held) for name, held in module.named_children() if isinstance(held, nn.Embedding)]
        shapes = {held.weight.shape for _, held in tables}
        if len(tables) != 2 or len(shapes) != 1:
            continue
        experts, columns = shapes.pop()
        names = [f"{prefix}{name}.weight" for name, _ in tables]
        matrices = tuple(Matrix(name, Unsqueeze((1,), Stored(name)), 1, columns, experts) for name in names)
        yield Bank(path, experts, matrices, (), frozenset(names))
