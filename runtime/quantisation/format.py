"""What every quantised format has in common: element codes in rows, and a grid of scales, one for each block.

A weight [..., R, C] is stored as codes [..., R, C / per] and scales [..., ceil(R / rows), ceil(C / columns)] for blocks
of `rows` x `columns`; the last block of either dimension may be ragged. Its value is code x scale in float32, rounded
once. Any region is decoded from just the codes and scales that it covers.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dayzero.runtime.packed import Layout, Shape, block, decoded_shape

Region = tuple[slice, ...]
Read = Callable[[str, Region], Tensor]
CHUNK = 1 << 20  # elements decoded at a time: what a read needs beside its result


@dataclass(frozen=True, kw_only=True)
class Format(Layout):
    """A layout, and what its numbers are.

    unpack: codes [rows, columns] -> float32 [rows, per * columns]. multipliers: scales [r, c] and the tensors of the
    roles in `once` (whole, read for every region) -> float32 [r, c].
    """

    unpack: Callable[[Tensor], Tensor]
    multipliers: Callable[[Tensor, Mapping[str, Tensor]], Tensor]


def decode(made: Format, tensors: Mapping[str, Tensor]) -> Tensor:
    """The whole weight in float32. tensors: by role."""
    shapes = {role: tuple(tensor.shape) for role, tensor in tensors.items()}
    shape = decoded_shape(made, shapes)
    out = torch.empty(shape)
    decode_into(out, made, lambda role, region: tensors[role][region], shapes, tuple(slice(0, n) for n in shape))
    return out


def decode_into(
    out: Tensor,
    made: Format,
    read: Read,
    shapes: Mapping[str, Shape],
    region: Region,
    put: Callable[[Tensor, Tensor], object] = Tensor.copy_,
) -> None:
    """Fills `out` with a region of the weight.

    read(role, region): part of a stored tensor. region: one slice a dimension, with a positive step; `out` has its
    lengths. put(place in `out`, values in float32) writes them, so many that no more than `CHUNK` are in memory.
    """
    shape = decoded_shape(made, shapes)
    single = len([size for size in shapes[made.scale] if size != 1]) == 0
    once = {role: read(role, tuple(slice(0, n) for n in shapes[role])) for role in made.once if role in shapes}
    _check_said_shape(made, once, shape)
    *leading, rows, columns = (range(part.start, part.stop, part.step or 1) for part in region)
    if not len(rows) or not len(columns):
        return
    sizes = block(made, shapes, shape)
    step = max(1, CHUNK // len(columns))
    for place in itertools.product(*(enumerate(numbers) for numbers in leading)):
        into = out[tuple(position for position, _ in place)]
        lead = tuple(slice(number, number + 1) for _, number in place)
        for start in range(0, len(rows), step):
            some = rows[start : start + step]
            values = _codes(made, read, lead, some, columns)
            scales = _scales(made, read, () if single else lead, some, columns, sizes, shapes, once)
            put(into[start : start + step], values.mul_(scales))


def _codes(made: Format, read: Read, lead: Region, rows: range, columns: range) -> Tensor:
    """float32 [rows, columns] before scaling."""
    unit = made.per * (made.inner or 1)
    first, last = columns[0] // unit, columns[-1] // unit + 1
    where = (*lead, slice(rows.start, rows[-1] + 1, rows.step), slice(first, last))
    stored = read(made.codes, where if made.inner is None else (*where, slice(0, made.inner)))
    stored = stored.reshape(len(rows), (last - first) * (made.inner or 1))
    offset = first * unit
    return made.unpack(stored)[:, columns[0] - offset : columns[-1] + 1 - offset : columns.step]


def _scales(
    made: Format,
    read: Read,
    lead: Region,
    rows: range,
    columns: range,
    sizes: tuple[int, int],
    shapes: Mapping[str, Shape],
    once: Mapping[str, Tensor],
) -> Tensor:
    """float32 multiplier of every element, [rows, columns]."""
    (top, bottom), (left, right) = (
        (numbers[0] // size, numbers[-1] // size + 1) for numbers, size in zip((rows, columns), sizes, strict=True)
    )
    where = (*lead, slice(top, bottom), slice(left, right))
    grid = shapes[made.scale]
    if len(where) > len(grid):  # one scale for all may be stored without dimensions
        where = tuple(slice(0, 1) for _ in grid)
    found = read(made.scale, where).reshape(bottom - top, right - left)
    made_of = made.multipliers(found, once)
    row_block = torch.arange(rows[0], rows[-1] + 1, rows.step).div_(sizes[0], rounding_mode="floor") - top
    column_block = torch.arange(columns[0], columns[-1] + 1, columns.step).div_(sizes[1], rounding_mode="floor") - left
    return made_of[row_block][:, column_block]


def _check_said_shape(made: Format, once: Mapping[str, Tensor], shape: Shape) -> None:
    if "shape" in once and tuple(once["shape"].tolist()) != shape:
        said = once["shape"].tolist()
        raise ValueError(f"{made.name} codes stand for {list(shape)}, but the tensor beside them says {said}")
