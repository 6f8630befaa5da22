"""Which tensors of a checkpoint are one quantised weight: decided for each by names, dtypes and shapes.

The config's own lists of what is quantised are not asked: they have been wrong.
"""

from collections.abc import Mapping
from typing import NamedTuple, Protocol

from dayzero.runtime.errors import InputError
from dayzero.runtime.quantisation import fp8, int4, mxfp4, nvfp4
from dayzero.runtime.quantisation.format import Format, Shape, decoded_shape

EXACT_IN_BF16 = {mxfp4.PACKED.name, mxfp4.BLOCKS.name, fp8.MX.name, fp8.UE8M0.name}
BYTES = ("U8", "I8")
POWERS = ("F8_E8M0", "U8")
NUMBERS = ("F32", "BF16", "F16")


class QuantizedTensor(NamedTuple):
    """One weight and what it is stored as.

    format: a name of `FORMATS`. parts: role -> name of the stored tensor. shape: of the weight. dtype: the narrower of
    "BF16" and "F32" that holds its values (of power-of-two scales, those in bfloat16's normal range).
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
            known[key] = (shape, "BF16" if made.name in EXACT_IN_BF16 else "F32")
        groups[weight] = QuantizedTensor(made.name, parts, *known[key])
    return groups


Group = tuple[str, Format, dict[str, str]]


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
            return weight, mxfp4.BLOCKS, {"blocks": name, "scales": f"{weight}_scales"}
    return None


def _fp8(name: str, headers: Mapping[str, Header]) -> Group | None:
    for scale in (f"{name}_scale_inv", f"{name}_scale", f"{name.removesuffix('weight')}scale"):
        dtype = _dtype(headers, scale)
        parts = {"weight": name, "scale": scale}
        if dtype in NUMBERS:
            return name, fp8.BLOCK, parts
        if dtype in POWERS:
            weight, grid = headers[name].shape, headers[scale].shape
            micro = len(weight) > 1 and tuple(grid) == (*weight[:-1], -(-weight[-1] // 32))
            return name, fp8.MX if micro else fp8.UE8M0, parts
    return None


def _packed(weight: str, codes: str, headers: Mapping[str, Header]) -> Group | None:
    if f"{weight}_zero_point" in headers:
        return None
    held = headers[codes].dtype
    for scale in (f"{weight}_scale", f"{weight.removesuffix('weight')}scale"):
        dtype = _dtype(headers, scale)
        parts = {"packed": codes, "scale": scale}
        if held in BYTES and dtype in POWERS:
            return weight, mxfp4.PACKED, parts
        if held == "I32" and dtype in NUMBERS:
            shape = {"shape": f"{weight}_shape"} if f"{weight}_shape" in headers else {}
            return weight, int4.PACKED, parts | shape
        if held in BYTES and dtype == "F8_E4M3":
            for role, other in ((nvfp4.DIVISOR, f"{weight}_global_scale"), (nvfp4.FACTOR, f"{weight}_scale_2")):
                if other in headers:
                    return weight, nvfp4.PACKED, {**parts, role: other}
    return None


def _dtype(headers: Mapping[str, Header], name: str) -> str | None:
    found = headers.get(name)
    return None if found is None else found.dtype
