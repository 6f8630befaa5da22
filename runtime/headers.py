"""Headers of a checkpoint's safetensors files: what every tensor is and where its bytes are. No tensor is read.

A file is 8 bytes of little-endian header length, the header as JSON, then the tensors' bytes end to end
(https://huggingface.co/docs/safetensors).
"""

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from dayzero.runtime.errors import InputError
from dayzero.runtime.safetensors_reader import shard_of_each_tensor

LENGTH_BYTES = 8
LONGEST_HEADER = 100_000_000  # the format's own limit
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


def read_headers(folder: Path) -> dict[str, TensorHeader]:
    """Tensor name -> header, for every tensor of every file that the index names, sorted by name.

    A name that stands in several files belongs to the one that the index says. Raises InputError for a folder without
    safetensors, a missing, truncated or overlong file, a malformed header, or an index that names a tensor its file
    does not have.
    """
    files = shard_of_each_tensor(folder)
    headers: dict[str, TensorHeader] = {}
    for file in sorted(set(files.values())):
        for name, header in read_file_headers(folder / file).items():
            if files.get(name, file) == file:
                headers[name] = header
    for name, file in files.items():
        if name not in headers:
            raise InputError(
                f"{folder / file}: {name}",
                found="no such tensor in this file",
                expected="the tensor that model.safetensors.index.json places here",
                hint="Index and shard are of different revisions. Download both again.",
            )
    return dict(sorted(headers.items()))


def read_file_headers(file: Path) -> dict[str, TensorHeader]:
    """The same for one file. Raises InputError if its header is malformed or its size is not what the header says."""
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
        text = stream.read(length)
    try:
        entries = json.loads(text)
        entries.pop("__metadata__", None)
        offset = LENGTH_BYTES + length
        headers = {
            name: TensorHeader(
                entry["dtype"],
                tuple(entry["shape"]),
                file.name,
                offset + entry["data_offsets"][0],
                offset + entry["data_offsets"][1],
            )
            for name, entry in entries.items()
        }
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
        found = f"a header that cannot be read ({type(error).__name__}: {error})"
        raise InputError(str(file), found=found, expected="a safetensors header") from None
    expected = max((header.end for header in headers.values()), default=offset)
    if size != expected:
        raise InputError(
            str(file),
            found=f"{size} bytes",
            expected=f"{expected} bytes, from the file's own header",
            hint="The file is truncated. Download it again."
            if size < expected
            else "The file is longer than its tensors.",
        )
    for name, header in headers.items():
        _check(file, name, header, offset)
    return headers


def _check(file: Path, name: str, header: TensorHeader, offset: int) -> None:
    if not isinstance(header.dtype, str) or header.dtype not in BITS:
        raise InputError(f"{file}: {name}", found=f"dtype {header.dtype!r}", expected=f"one of {', '.join(BITS)}")
    if not all(isinstance(dim, int) and dim >= 0 for dim in header.shape):
        raise InputError(f"{file}: {name}", found=f"shape {list(header.shape)}", expected="sizes of 0 or more")
    needed = math.ceil(math.prod(header.shape) * BITS[header.dtype] / 8)
    if header.start < offset or header.bytes != needed:
        raise InputError(
            f"{file}: {name}",
            found=f"{header.bytes} bytes at {header.start}",
            expected=f"{needed} bytes, from {header.dtype} {list(header.shape)}, at {offset} or later",
        )


def headers_sha256(headers: Mapping[str, TensorHeader]) -> str:
    """Hex digest over one line `name dtype shape file` per tensor, sorted by name. Byte offsets do not count."""
    digest = hashlib.sha256()
    for name, header in sorted(headers.items()):
        shape = ",".join(map(str, header.shape))
        digest.update(f"{name}\t{header.dtype}\t[{shape}]\t{header.file}\n".encode())
    return digest.hexdigest()
