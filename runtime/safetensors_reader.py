"""Reads tensors of a checkpoint folder, whole or sliced: only the bytes that are asked for."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import shard_of_each_tensor

Region = tuple[slice, ...]


class SafetensorsReader:
    """Sliced reads by tensor name. Keeps a few files open, as memory maps.

    `files`: tensor name -> file name inside `folder`.
    """

    OPEN = 8  # the parts of a quantised weight may be in different files

    def __init__(self, folder: Path, files: Mapping[str, str] | None = None):
        self.folder = folder
        self.files = files if files is not None else shard_of_each_tensor(folder)
        self._open: dict[str, Any] = {}
        self._dtypes: dict[str, torch.dtype] = {}

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """The tensor, or the part of it that `region` (one slice a dimension) selects, in the dtype on disk. Its bytes
        stay in the file until they are used.

        Raises InputError for a name that the checkpoint does not have, or a shard that cannot be read.
        """
        shard = self._shard(name)
        view = shard.get_slice(name)
        if region is None or not view.get_shape():
            return shard.get_tensor(name)
        if any(part.step not in (None, 1) for part in region):
            covered = view[tuple(slice(part.start, part.stop) for part in region)]
            return covered[tuple(slice(None, None, part.step) for part in region)]
        return view[region]

    def dtype(self, name: str) -> torch.dtype:
        """The tensor's dtype on disk. Raises InputError as `read` does."""
        if name not in self._dtypes:
            self._dtypes[name] = torch_dtype(self._shard(name).get_slice(name).get_dtype())
        return self._dtypes[name]

    def _shard(self, name: str) -> Any:
        if name not in self.files:
            raise InputError(name, found="not in the checkpoint", expected=f"a tensor of {self.folder}")
        file = self.files[name]
        if file not in self._open:
            while len(self._open) >= self.OPEN:
                del self._open[next(iter(self._open))]
            try:
                self._open[file] = safe_open(self.folder / file, framework="pt")
            except Exception as error:
                where = str(self.folder / file)
                raise InputError(where, found=str(error), expected="a complete safetensors file") from None
        return self._open[file]


class TensorsReader:
    """The same interface over tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = tensors

    def read(self, name: str, region: Region | None = None) -> Tensor:
        tensor = self.tensors[name]
        return tensor if region is None or tensor.ndim == 0 else tensor[region]

    def dtype(self, name: str) -> torch.dtype:
        return self.tensors[name].dtype


def torch_dtype(name: str) -> torch.dtype:
    """The torch dtype that a safetensors header spells `F32`, `BF16`, ...  Raises KeyError for an unknown one."""
    return {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U8": torch.uint8,
        "BOOL": torch.bool,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
    }[name]
