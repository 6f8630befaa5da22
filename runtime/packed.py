"""How checkpoints store quantised weights: which tensors are one weight, and its shape. No number is decoded here, and
nothing that could decode one is imported.

The config's own lists of what is quantised are not asked: they have been wrong.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from dayzero.runtime.errors import InputError

Shape = tuple[int, ...]
BLOCKS = ((128, 128), (1, 128), (1, 32), (1, 16), (64, 64), (32, 32), (16, 16), (256, 256))
BYTES = ("U8", "I8")
POWERS = ("F8_E8M0", "U8")
NUMBERS = ("F32", "BF16", "F16")
DIVISOR, FACTOR = "global_scale", "scale_2"  # of NVFP4: one scale for the whole tensor


@dataclass(frozen=True)
class Layout:
    """codes, scale: roles of the two tensors. per: elements in one stored column. once: roles of further tensors that
    hold for the whole weight. inner: size of the codes' last dimension where that repeats inside a block: codes
    [..., R, G, inner] are columns [..., R, G * inner]. exact: bfloat16 holds all values. swapped: a tensor of the name
    that the weight has where it is not quantised has its last two dimensions the other way round."""

    name: str
    codes: str
    scale: str
    per: int
    once: tuple[str, ...] = ()
    inner: int | None = None
    exact: bool = False
    swapped: bool = False


FP8_BLOCK = Layout("fp8_block", "weight", "scale", 1)
FP8_UE8M0 = Layout("fp8_ue8m0", "weight", "scale", 1, exact=True)
MXFP8 = Layout("mxfp8", "weight", "scale", 1, exact=True)
MXFP4_PACKED = Layout("mxfp4_packed", "packed", "scale", 2, exact=True)
MXFP4_BLOCKS = Layout("mxfp4_blocks", "blocks", "scales", 2, inner=16, exact=True, swapped=True)
INT4_PACKED = Layout("int4_packed", "packed", "scale", 8, once=("shape",))
NVFP4 = Layout("nvfp4", "packed", "scale", 2, once=(DIVISOR, FACTOR))


def decoded_shape(made: Layout, shapes: Mapping[str, Shape]) -> Shape:
    """Shape of the weight that tensors of these shapes stand for. Raises ValueError where they do not fit together."""
    codes = shapes[made.codes]
    if made.inner is not None:
        if len(codes) < 3 or codes[-1] != made.inner:
            raise ValueError(f"{made.name} codes {list(codes)} do not end in {made.inner}")
        codes = (*codes[:-2], codes[-2] * made.inner)
    if len(codes) < 2:
        raise ValueError(f"{made.name} codes {list(codes)} are not a matrix")
    shape = (*codes[:-1], codes[-1] * made.per)
    block(made, shapes, shape)
    return shape


def block(made: Layout, shapes: Mapping[str, Shape], shape: Shape) -> tuple[int, int]:
    """(rows, columns) that share a scale. Raises ValueError where no block size explains the scales' shape."""
    grid = shapes[made.scale]
    if len([size for size in grid if size != 1]) == 0:
        return max(shape[-2], 1), max(shape[-1], 1)  # one scale for all
    if len(grid) != len(shape) or grid[:-2] != shape[:-2]:
        raise ValueError(f"{made.name} scales {list(grid)} are no grid over {list(shape)}")
    exact = tuple(
        size // count if count and size % count == 0 else 0 for size, count in zip(shape[-2:], grid[-2:], strict=True)
    )
    for rows, columns in (*BLOCKS, exact):
        if rows and columns and (-(-shape[-2] // rows), -(-shape[-1] // columns)) == grid[-2:]:
            return rows, columns
    raise ValueError(f"{made.name} scales {list(grid)} are no grid over {list(shape)}")


class QuantizedTensor(NamedTuple):
    """One weight and what it is stored as.

    format: a name of `quantisation.FORMATS`. parts: role -> name of the stored tensor. shape: of the weight. dtype: the
    narrower of "BF16" and "F32" that holds its values (of power-of-two scales, those in bfloat16's normal range).
    """

    format: str
    parts: dict[str, str]
    shape: Shape
    dtype: str


class Header(Protocol):
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Shape: ...


def quantised_groups(headers: Mapping[str, Header]) -> dict[str, QuantizedTensor]:
    """Weight name -> its parts, for every quantised weight. The name is the one it has where it is not quantised:
    `w1.weight` for `w1.weight_packed`, `gate_up_proj` for `gate_up_proj_blocks`.

    Raises InputError where scales are no grid over their weight. A tensor in a quantised dtype without scales, or with
    zero points, belongs to no group.
    """
    groups: dict[str, QuantizedTensor] = {}
    known: dict[tuple, tuple[Shape, str]] = {}
    for name, header in headers.items():
        found = _group_of(name, header.dtype, headers)
        if found is None:
            continue
        weight, made, parts = found
        key = (made.name, *[headers[part].shape for part in parts.values()])
        if key not in known:
            try:
                shape = decoded_shape(made, {role: tuple(headers[part].shape) for role, part in parts.items()})
            except ValueError as error:
                raise InputError(name, found=str(error), expected=f"a weight stored as {made.name}") from None
            known[key] = (shape, "BF16" if made.exact else "F32")
        groups[weight] = QuantizedTensor(made.name, parts, *known[key])
    return groups


Group = tuple[str, Layout, dict[str, str]]


def _group_of(name: str, dtype: str, headers: Mapping[str, Header]) -> Group | None:
    """(weight, format, parts) if `name` holds the codes of one."""
    if dtype == "F8_E4M3":
        return _fp8(name, headers)
    if name.endswith("weight_packed"):
        return _packed(name.removesuffix("_packed"), name, headers)
    if dtype not in BYTES:
        return None
    if name.endswith("weight"):
        return _packed(name, name, headers)
    if name.endswith("_blocks"):
        weight = name.removesuffix("_blocks")
        if _dtype(headers, f"{weight}_scales") in POWERS:
            return weight, MXFP4_BLOCKS, {"blocks": name, "scales": f"{weight}_scales"}
    return None


def _fp8(name: str, headers: Mapping[str, Header]) -> Group | None:
    for scale in (f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('weight')}scale"):
        dtype = _dtype(headers, scale)
        parts = {"weight": name, "scale": scale}
        if dtype in NUMBERS:
            return name, FP8_BLOCK, parts
        if dtype in POWERS:
            weight, grid = headers[name].shape, headers[scale].shape
            micro = len(weight) > 1 and tuple(grid) == (*weight[:-1], -(-weight[-1] // 32))
            return name, MXFP8 if micro else FP8_UE8M0, parts
    return None


def _packed(weight: str, codes: str, headers: Mapping[str, Header]) -> Group | None:
    if f"{weight}_zero_point" in headers:
        return None
    held = headers[codes].dtype
    for scale in (f"{weight}_scale", f"{weight.removesuffix('weight')}scale"):
        dtype = _dtype(headers, scale)
        parts = {"packed": codes, "scale": scale}
        if held in BYTES and dtype in POWERS:
            return weight, MXFP4_PACKED, parts
        if held == "I32" and dtype in NUMBERS:
            shape = {"shape": f"{weight}_shape"} if f"{weight}_shape" in headers else {}
            return weight, INT4_PACKED, parts | shape
        if held in BYTES and dtype == "F8_E4M3":
            for role, other in ((DIVISOR, f"{weight}_global_scale"), (FACTOR, f"{weight}_scale_2")):
                if other in headers:
                    return weight, NVFP4, {**parts, role: other}
    return None


def _dtype(headers: Mapping[str, Header], name: str) -> str | None:
    found = headers.get(name)
    return None if found is None else found.dtype
