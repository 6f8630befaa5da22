"""Layouts of quantised weights that are known by sight and not read here: the message says which, and what is read."""

from collections.abc import Mapping, Sequence
from typing import Protocol

from dayzero.runtime.packed import (
    FP8_BLOCK,
    FP8_UE8M0,
    INT4_PACKED,
    MXFP4_BLOCKS,
    MXFP4_PACKED,
    MXFP8,
    NVFP4,
)

READ = tuple(made.name for made in (FP8_BLOCK, FP8_UE8M0, MXFP8, MXFP4_PACKED, MXFP4_BLOCKS, INT4_PACKED, NVFP4))
_WORD = 32  # bits


class Stored(Protocol):
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> Sequence[int]: ...


def unread_layouts(stored: Mapping[str, Stored]) -> dict[str, list[str]]:
    """What a layout is -> the tensors that hold its codes. stored: headers by name, or one of each by pattern."""
    found: dict[str, list[str]] = {}
    for name, header in stored.items():
        layout = _layout(name, header, stored)
        if layout is not None:
            found.setdefault(layout, []).append(name)
    return found


def _layout(name: str, header: Stored, stored: Mapping[str, Stored]) -> str | None:
    if name.endswith(".qweight") and header.dtype in {"I32", "U32"} and len(header.shape) == 2:
        scales = stored.get(f"{name.removesuffix('qweight')}scales")
        if scales is None or len(scales.shape) != 2:
            return None
        outputs, columns = scales.shape[1], header.shape[1]
        beside = " and ".join(
            part for part in ("qzeros", "scales", "g_idx") if f"{name.removesuffix('qweight')}{part}" in stored
        )
        if columns == outputs:
            return f"int32 words over the inputs with {beside}, as GPTQ writes them"
        if columns and outputs % columns == 0 and _WORD % (outputs // columns) == 0:
            bits = _WORD // (outputs // columns)
            return f"int32 words of {bits} bits over the outputs with {beside}, as AWQ writes them"
        return f"int32 words with {beside}"
    if name.endswith("weight_packed") and f"{name.removesuffix('packed')}zero_point" in stored:
        return "packed words with zero points, as compressed-tensors writes asymmetric formats"
    if header.dtype in {"U8", "I8"} and f"{name}.absmax" in stored:
        return "bytes with absmax and a table of values, as bitsandbytes writes them"
    return None


def place_and_reason(layout: str, names: list[str]) -> tuple[str, str]:
    """(where, why) of a message about it."""
    also = f" and {len(names) - 1} more" if names[1:] else ""
    why = f"quantised in a layout that is not read here: {layout}. Read are {', '.join(READ)}, and plain weights"
    return names[0] + also, why
