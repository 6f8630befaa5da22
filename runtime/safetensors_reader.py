"""Reads tensors of a checkpoint folder, whole or sliced: only the bytes that are asked for."""

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from dayzero.runtime.errors import InputError

Region = tuple[slice, ...]


def shard_of_each_tensor(folder: Path) -> dict[str, str]:
    """Tensor name -> file name, from the index or from the single file.

    Raises InputError for a folder without safetensors, an index that names a file outside the folder, a shard that is
    missing, or one that is a link out of the folder.
    """
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        try:
            weight_map = json.loads(index.read_text())["weight_map"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise InputError(str(index), found=f"no readable weight_map ({error})", expected="tensor -> file") from None
        if not isinstance(weight_map, dict) or not weight_map:
            raise InputError(str(index), found=f"weight_map {str(weight_map)[:40]}", expected="tensor -> file")
        for name, file in weight_map.items():
            if not isinstance(file, str) or Path(file).name != file or file in {"", ".", ".."}:
                raise InputError(
                    f"{index}: {name}",
                    found=f"file {file!r}",
                    expected="the name of a file inside the checkpoint folder",
                    hint="An index that points elsewhere is refused: it could read any file of this machine.",
                )
        for file in sorted(set(weight_map.values())):
            if not (folder / file).is_file():
                missing = sum(1 for shard in weight_map.values() if shard == file)
                raise InputError(
                    str(folder / file),
                    found="no such file",
                    expected=f"a shard with {missing} tensors that {index.name} lists",
                    hint="Download it again; nothing was written.",
                )
            _check_inside(folder, file)
        return weight_map
    if single.is_file():
        _check_inside(folder, single.name)
        return dict.fromkeys(_keys(single), single.name)
    pickles = sorted(path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in folder.glob(pattern))
    if pickles:
        raise InputError(
            str(folder),
            found=f"only pickled weights ({', '.join(pickles[:3])})",
            expected="safetensors",
            hint="A pickle can run any code when it is opened, so it is never opened. Convert it where you trust it: "
            "save_file(torch.load(FILE, weights_only=True), 'model.safetensors').",
        )
    raise InputError(
        str(folder),
        found="no model.safetensors and no model.safetensors.index.json" if folder.is_dir() else "no such folder",
        expected="a Hugging Face checkpoint folder",
    )


def _check_inside(folder: Path, file: str) -> None:
    """Raises InputError for a link that leads out of the folder, unless to where the Hub's cache keeps the content:
    snapshots/REVISION/FILE links to blobs/HASH."""
    home, target = folder.resolve(), (folder / file).resolve()
    if target.parent not in {home, home.parent.parent / "blobs"}:
        raise InputError(
            str(folder / file),
            found=f"a link to {target}",
            expected="a file inside the checkpoint folder",
            hint="A link that leads elsewhere is refused: it could read any file of this machine. Copy the file here.",
        )


def _keys(file: Path) -> list[str]:
    try:
        with safe_open(file, framework="pt") as shard:
            return list(shard.keys())
    except Exception as error:
        raise InputError(str(file), found=str(error), expected="a complete safetensors file") from None


class SafetensorsReader:
    """Sliced reads by tensor name. Keeps one file open at a time, as a memory map.

    `files`: tensor name -> file name inside `folder`.
    """

    def __init__(self, folder: Path, files: Mapping[str, str] | None = None):
        self.folder = folder
        self.files = files if files is not None else shard_of_each_tensor(folder)
        self._open: tuple[str, object] | None = None

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """The tensor, or the part of it that `region` (one slice a dimension) selects, in the dtype on disk.

        Raises InputError for a name that the checkpoint does not have, or a shard that cannot be read.
        """
        if name not in self.files:
            raise InputError(name, found="not in the checkpoint", expected=f"a tensor of {self.folder}")
        file = self.files[name]
        if self._open is None or self._open[0] != file:
            try:
                self._open = (file, safe_open(self.folder / file, framework="pt"))
            except Exception as error:
                where = str(self.folder / file)
                raise InputError(where, found=str(error), expected="a complete safetensors file") from None
        shard = self._open[1]
        view = shard.get_slice(name)  # type: ignore[attr-defined]
        if not view.get_shape():
            return shard.get_tensor(name)  # type: ignore[attr-defined]
        return view[region if region is not None else (slice(None),)]


class TensorsReader:
    """The same interface over tensors in memory."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self.tensors = tensors

    def read(self, name: str, region: Region | None = None) -> Tensor:
        tensor = self.tensors[name]
        return tensor if region is None or tensor.ndim == 0 else tensor[region]


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
    }[name]
