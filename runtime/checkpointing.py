"""Checkpoints of a run: complete or not there, verified before use, readable on any number of ranks.

    run/checkpoints/step_00000050/  __0_0.distcp ... .metadata  manifest.json

A checkpoint is written into a hidden folder, every file is hashed, the hashes go into manifest.json, and only then does
the folder take its name. A folder that has its name is never written again. It holds the trained parameters and their
optimizer state; randomness is a function of (seed, step, rank), so the step number stands for it.
"""

import functools
import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dayzero.runtime.errors import InputError

MANIFEST = "manifest.json"
MODEL, OPTIMIZER = "model.", "optimizer."


def save(run: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer, keep: int) -> Path:
    """Writes the checkpoint of `step` (steps done), removes all but the `keep` newest, and returns its folder.

    All ranks call it, and all see the same file system. Raises OSError if it cannot be written; the checkpoints that
    were there stay as they are.
    """
    folder = run / "checkpoints" / f"step_{step:08d}"
    partial = folder.with_name(f".{folder.name}.partial")
    if dist.get_rank() == 0:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    dist.barrier()
    try:
        state_dict_saver.save(_state(model, optimizer), checkpoint_id=str(partial))
    except CheckpointException as error:  # a BaseException
        raise OSError(f"{folder} could not be written: {_cause(error)}") from None
    files = sorted(path.name for path in partial.iterdir())
    hashes = _each_rank(_hashes(partial, files[dist.get_rank() :: dist.get_world_size()]))
    if dist.get_rank() == 0:
        every = {name: entry for part in hashes for name, entry in part.items()}
        manifest = {"step": step, "ranks": dist.get_world_size(), "files": every}
        with (partial / MANIFEST).open("w") as stream:
            json.dump(manifest, stream, indent=1, sort_keys=True)
            stream.flush()
            os.fsync(stream.fileno())
        partial.rename(folder)
        for old in checkpoints(run)[keep:]:
            shutil.rmtree(old)
    dist.barrier()
    return folder


def checkpoints(run: Path) -> list[Path]:
    """The folders of all complete checkpoints, newest first, not verified."""
    return sorted((run / "checkpoints").glob("step_" + "[0-9]" * 8), reverse=True)


def latest(run: Path) -> Path | None:
    """The newest checkpoint whose every byte is as it was written, None if there is none. For a single process."""
    return next((folder for folder in checkpoints(run) if not problem(folder)), None)


def step_of(checkpoint: Path) -> int:
    """Steps that were done when it was written."""
    return int(checkpoint.name.removeprefix("step_"))


def problem(checkpoint: Path, rank: int = 0, ranks: int = 1) -> str:
    """What is wrong with the checkpoint, "" if nothing is. Each of `ranks` hashes its share of the files."""
    try:
        files = json.loads((checkpoint / MANIFEST).read_text())["files"]
    except (OSError, ValueError, KeyError) as error:
        return f"{checkpoint / MANIFEST}: {type(error).__name__}: {error}"
    for name, (size, _) in files.items():
        path = checkpoint / name
        if not path.is_file() or path.stat().st_size != size:
            found = f"{path.stat().st_size} bytes" if path.is_file() else "no such file"
            return f"{path}: {found}, expected {size} bytes"
    for name, (_, digest) in _hashes(checkpoint, sorted(files)[rank::ranks]).items():
        if digest != files[name][1]:
            return f"{checkpoint / name}: its bytes have changed since it was written"
    return ""


def restore(run: Path, model: nn.Module, optimizer: torch.optim.Optimizer, note=print) -> int:
    """Loads the newest good checkpoint into model and optimizer and returns its step, 0 if the run has none.

    A damaged one is set aside as step_N.damaged, with a note, and the one before it is tried. All ranks call it.
    Raises InputError if all are damaged, or for one that is sound but belongs to other parameters.
    """
    rank, ranks, found = dist.get_rank(), dist.get_world_size(), []
    for folder in checkpoints(run):
        dist.barrier()
        found = [text for text in _each_rank(problem(folder, rank, ranks)) if text]
        if not found:
            _load(folder, model, optimizer)
            return step_of(folder)
        if rank == 0:
            note(f"checkpoint damaged, using the one before it: {found[0]}")
            folder.rename(folder.with_name(f"{folder.name}.damaged"))
    if found:
        raise InputError(
            str(run / "checkpoints"),
            found=f"only damaged checkpoints; the last: {found[0]}",
            expected="one whose bytes are as they were written",
            hint="Start again in a new folder, without --resume.",
        )
    return 0


def load_full(checkpoint: Path) -> Mapping[str, Tensor]:
    """The trained parameters by name, each read whole when asked for. For a single process, without a process group.

    After LoRA these are the adapters alone; after full fine-tuning all parameters.
    """
    return _FullTensors(checkpoint)


class _ReaderOfOne(FileSystemReader):
    """Reads the metadata once: it lists every tensor, and a load asks for it twice."""

    @functools.cache  # noqa: B019  a reader lives as long as its mapping
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        return super().read_metadata(*args, **kwargs)


class _FullTensors(Mapping[str, Tensor]):
    def __init__(self, checkpoint: Path):
        self.reader = _ReaderOfOne(checkpoint)
        entries = self.reader.read_metadata().state_dict_metadata
        self.entries = {
            name.removeprefix(MODEL): entry
            for name, entry in entries.items()
            if name.startswith(MODEL) and isinstance(entry, TensorStorageMetadata)
        }

    def __getitem__(self, name: str) -> Tensor:
        entry = self.entries[name]
        tensor = torch.empty(entry.size, dtype=entry.properties.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")
            state_dict_loader.load({MODEL + name: tensor}, storage_reader=self.reader, no_dist=True)
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Trained parameters and their optimizer state under flat names, sharing memory with the live ones."""
    state: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state[MODEL + name] = parameter.detach()
            for key, value in optimizer.state[parameter].items():
                state[f"{OPTIMIZER}{name}.{key}"] = value
    return state


def _load(folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, parameter in model.named_parameters():
        if f"{OPTIMIZER}{name}.exp_avg" in saved:
            zeros = {key: torch.zeros_like(parameter.detach()) for key in ("exp_avg", "exp_avg_sq")}
            optimizer.state[parameter] = {"step": torch.tensor(0.0), **zeros}
    try:
        state_dict_loader.load(_state(model, optimizer), checkpoint_id=str(folder))
    except CheckpointException as error:  # a BaseException
        raise InputError(
            str(folder),
            found=_cause(error),
            expected="the parameters of this package and these settings",
            hint="Resume with the settings the run was started with.",
        ) from None


def _cause(error: CheckpointException) -> str:
    """What went wrong on the first rank that failed, in one line."""
    first = next(iter(error.failures.values()))[0]
    return " ".join(str(first).split())[:300]


def _hashes(folder: Path, names: list[str]) -> dict[str, tuple[int, str]]:
    """name -> (bytes, sha256)."""
    hashes = {}
    for name in names:
        with (folder / name).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            hashes[name] = (stream.tell(), digest)
    return hashes


def _each_rank(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values
