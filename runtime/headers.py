"""Headers of a checkpoint's safetensors files: what every tensor is and where its bytes are. No tensor is read.

A file is 8 bytes of little-endian header length, the header as JSON, then the tensors' bytes end to end
(https://huggingface.co/docs/safetensors).
"""

import contextlib
import gc
import hashlib
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from dayzero.runtime.errors import InputError
from dayzero.runtime.shards import SINGLE, read_index
from dayzero.runtime.strict_json import object_without_duplicates, parse, shown

LENGTH_BYTES = 8
LONGEST_HEADER = 100_000_000  # the format's own limit
LONGEST_NAME, MOST_DIMENSIONS = 512, 32
NAME_CHARACTERS = b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_.-/:"
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32, "U64": 64, "I64": 64,
    "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6,
    "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8,
}  # fmt: skip


class TensorHeader(NamedTuple):
    """dtype: as safetensors spells it ("BF16"). start, end: the tensor's bytes, counted from the start of `file`."""

    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def bytes(self) -> int:
        return self.end - self.start


@contextlib.contextmanager
def collector_paused() -> Iterator[None]:
    """Python's garbage collector looks again and again through half a million new tuples, none of which is garbage:
    it takes as long as reading them."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Tensor name -> header, for every tensor of every file that the index names, sorted by name.

    A name that stands in several files belongs to the one that the index says. Raises InputError for a folder without
    safetensors, a missing, truncated or overlong file, a malformed header, or an index that names a tensor its file
    does not have.
    """
    with collector_paused():
        placed = read_index(folder)
        if placed is None:
            found = read_file_headers(folder / SINGLE)
            return {name: found[name] for name in sorted(found)}
        headers: dict[str, TensorHeader] = {}
        for file in sorted(set(placed.values())):
            found = read_file_headers(folder / file)
            twice = headers.keys() & found.keys()
            kept = {name: headers[name] for name in twice if placed.get(name, file) != file}
            headers.update(found)
            headers.update(kept)
        for name, file in placed.items():
            if name not in headers or headers[name].file != file:
                raise InputError(
                    f"{folder / file}: {shown(name)[1:-1]}",
                    found="no such tensor in this file",
                    expected="the tensor that model.safetensors.index.json places here",
                    hint="Index and shard are of different revisions. Download both again.",
                )
        return {name: headers[name] for name in sorted(headers)}


def shard_of_each_tensor(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or from the single file. Raises InputError as `read_headers` does."""
    placed = read_index(folder)
    return placed if placed is not None else dict.fromkeys(read_file_headers(folder / SINGLE), SINGLE)


def read_file_headers(file: Path) -> dict[str, TensorHeader]:
    """The same for one file. Raises InputError if its header is malformed or its size is not what the header says."""
    size, text = _header_text(file)
    offset = LENGTH_BYTES + len(text)
    shapes: dict[tuple[int, ...], tuple[int, ...]] = {}  # one object a shape, however many tensors have it
    name_of_file, new = file.name, tuple.__new__
    odd = b"true" in text or b"false" in text  # in Python they are equal to 1 and 0: every number is looked at

    def entry(pairs: list[tuple[str, Any]]) -> Any:
        if len(pairs) == 3 and not odd:
            (first, dtype), (second, shape), (third, ends) = pairs
            if first == "dtype" and second == "shape" and third == "data_offsets":
                start, end = ends
                shape = tuple(shape)
                shape = shapes.setdefault(shape, shape)
                return new(TensorHeader, (dtype, shape, name_of_file, offset + start, offset + end))
        return _unusual_entry(pairs, name_of_file, offset)

    try:
        headers = parse(text, entry, _no_float, int)
        if isinstance(headers, TensorHeader):  # a file with three tensors that are named like the fields of one
            raise ValueError("tensors named dtype, shape and data_offsets")
        headers.pop("__metadata__", None)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
        found = f"a header that cannot be read ({type(error).__name__}: {error})"
        raise InputError(str(file), found=found, expected="a safetensors header") from None
    _check_names(file, headers)
    fits: set[tuple[str, tuple[int, ...], int]] = set()
    for name, header in headers.items():
        if type(header) is not TensorHeader:
            raise InputError(f"{file}: {name}", found=shown(header), expected="dtype, shape and data_offsets")
        try:
            known = (header[0], header[1], header[4] - header[3]) in fits
        except TypeError:  # something that is no key, such as a list for a dtype
            known = False
        if odd or not known:
            _check(file, name, header, offset)
            fits.add((header.dtype, header.shape, header.bytes))
    _check_spans(file, headers, offset, size)
    return headers


def _header_text(file: Path) -> tuple[int, bytes]:
    """(size of the file, its header)."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        first = stream.read(LENGTH_BYTES)
        length = int.from_bytes(first, "little")
        if first.startswith(b"version "):
            raise InputError(
                str(file),
                found="a Git LFS pointer, not the tensors",
                expected="a safetensors file",
                hint="Fetch the data with: git lfs pull",
            )
        if len(first) < LENGTH_BYTES or length > min(LONGEST_HEADER, size - LENGTH_BYTES):
            raise InputError(
                str(file),
                found=f"{size} bytes",
                expected=f"a safetensors file, whose header alone would be {LENGTH_BYTES + length} bytes",
                hint="The file is truncated or not safetensors. Download it again.",
            )
        return size, stream.read(length)


def _no_float(text: str) -> float:
    raise ValueError(f"the number {shown(text)} is not whole")


def _unusual_entry(pairs: list[tuple[str, Any]], file: str, offset: int) -> Any:
    """The outermost object, the metadata, or an entry whose fields stand in another order."""
    made = object_without_duplicates(pairs)
    if made.keys() == {"dtype", "shape", "data_offsets"} and isinstance(made["data_offsets"], list):
        start, end = made["data_offsets"]
        if type(start) is not int or type(end) is not int:
            raise ValueError(f"data_offsets {shown([start, end])}")
        return TensorHeader(made["dtype"], tuple(made["shape"]), file, offset + start, offset + end)
    return made


def _check_names(file: Path, headers: Mapping[str, TensorHeader]) -> None:
    """Names reach terminals, reports and weight rules: they are module paths and nothing else."""
    if not "\n".join(headers).encode(errors="replace").translate(None, NAME_CHARACTERS + b"\n") and not any(
        "\n" in name or not name or len(name) > LONGEST_NAME for name in headers
    ):
        return
    allowed = set(NAME_CHARACTERS.decode())
    name = next(name for name in headers if not name or len(name) > LONGEST_NAME or set(name) - allowed)
    raise InputError(
        str(file),
        found=f"a tensor named {shown(name)}",
        expected=f"up to {LONGEST_NAME} letters, digits and any of _.-/:",
        hint="No tool writes such a name; the file may be damaged or made to deceive.",
    )


def _check(file: Path, name: str, header: TensorHeader, offset: int) -> None:
    if not isinstance(header.dtype, str) or header.dtype not in BITS:
        raise InputError(f"{file}: {name}", found=f"dtype {shown(header.dtype)}", expected=f"one of {', '.join(BITS)}")
    whole = all(type(dim) is int and 0 <= dim < 2**63 for dim in header.shape)
    if not whole or len(header.shape) > MOST_DIMENSIONS:
        raise InputError(
            f"{file}: {name}",
            found=f"shape {shown(list(header.shape))}",
            expected=f"at most {MOST_DIMENSIONS} sizes of 0 or more",
        )
    needed = -(-math.prod(header.shape) * BITS[header.dtype] // 8)
    if header.start < offset or header.bytes != needed:
        raise InputError(
            f"{file}: {name}",
            found=f"{header.bytes} bytes at {header.start}",
            expected=f"{needed} bytes, from {header.dtype} {list(header.shape)}, at {offset} or later",
        )


def _check_spans(file: Path, headers: Mapping[str, TensorHeader], offset: int, size: int) -> None:
    """The tensors' bytes stand end to end: no gap that hides something, no two tensors that share bytes."""
    spans = sorted((header[3], header[4], name) for name, header in headers.items())
    end = spans[-1][1] if spans else offset
    if size != end:
        raise InputError(
            str(file),
            found=f"{size} bytes",
            expected=f"{end} bytes, from the file's own header",
            hint="The file is truncated. Download it again." if size < end else "The file is longer than its tensors.",
        )
    last = offset
    for start, end, name in spans:
        if start != last:
            wrong = "a gap before them" if start > last else "shared with another tensor"
            raise InputError(
                f"{file}: {name}",
                found=f"bytes {start} to {end}, {wrong}",
                expected=f"a tensor that starts where the one before it ends, at {last}",
                hint="Tensors in a safetensors file stand end to end. Was the header edited?",
            )
        last = end


def headers_sha256(headers: Mapping[str, TensorHeader]) -> str:
    """Hex digest over one line `name dtype shape file` per tensor, sorted by name. Byte offsets do not count."""
    shapes = {shape: ",".join(map(str, shape)) for shape in {header[1] for header in headers.values()}}
    lines = [
        f"{name}\t{dtype}\t[{shapes[shape]}]\t{file}\n"
        for name, (dtype, shape, file, _, _) in ((name, headers[name]) for name in sorted(headers))
    ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
