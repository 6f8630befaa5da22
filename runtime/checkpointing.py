"""Checkpoints of a run: complete or not there, verified before use, readable on any number of ranks.

    run/checkpoints/step_00000050/  __0_0.distcp ... .metadata  manifest.json

A checkpoint is written into a hidden folder, every file is hashed, the hashes go into manifest.json, and only then does
the folder take its name. A folder that has its name is never written again, and loses its name before it is removed. It
holds the trained parameters and their optimizer state. Randomness and the order of the data are functions of (seed,
step, rank), so the step number stands for them.
"""

import functools
import math
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata

from dayzero.runtime import manifest
from dayzero.runtime.errors import InputError
from dayzero.runtime.moments import local
from dayzero.runtime.optimizer import Optimizer

MODEL, OPTIMIZER = "model.", "optimizer."
State = dict[str, Tensor]


def save(
    run: Path,
    step: int,
    model: nn.Module,
    optimizer: Optimizer,
    keep: int,
    keep_best: int = 0,
    held_out_loss: float | None = None,
) -> Path:
    """Writes the checkpoint of `step` (steps done), and returns its folder. See `write`."""
    return write(run, step, state_of(model, optimizer), keep, keep_best, held_out_loss)


def write(
    run: Path,
    step: int,
    state: State,
    keep: int,
    keep_best: int = 0,
    held_out_loss: float | None = None,
    group: ProcessGroup | None = None,
) -> Path:
    """Writes `state` as the checkpoint of `step`, and removes all but the `keep` newest and the `keep_best` with the
    lowest held-out loss.

    All ranks of `group` call it, and all see the same file system. Raises OSError, on all ranks, if it cannot be
    written; the checkpoints that were there stay as they are, and what was written of this one is removed.
    """
    folder = run / "checkpoints" / f"step_{step:08d}"
    partial = folder.with_name(f".{folder.name}.partial")
    rank, ranks = dist.get_rank(group), dist.get_world_size(group)
    try:
        _together(lambda: _start(partial) if rank == 0 else None, group)
        try:
            state_dict_saver.save(state, checkpoint_id=str(partial), process_group=group)
        except CheckpointException as error:  # a BaseException
            raise OSError(_cause(error)) from None
        parts = _together(lambda: manifest.hashes(partial, _names(partial)[rank::ranks]), group)

        def finish() -> None:
            files = {name: entry for part in parts for name, entry in part.items()}
            loss = held_out_loss if held_out_loss is not None and math.isfinite(held_out_loss) else None
            manifest.write(partial, step, files, ranks=ranks, held_out_loss=loss)
            partial.rename(folder)
            manifest.sync_folder(folder.parent)

        _together(finish if rank == 0 else lambda: None, group)
    except OSError as error:
        cause = _why(error, partial, state)
        dist.barrier(group)
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise OSError(f"{folder} could not be written: {cause}") from None
    if rank == 0:
        for old in _superfluous(run, keep, keep_best):
            _remove(old)
    return folder


def checkpoints(run: Path) -> list[Path]:
    """The folders of all complete checkpoints, newest first, not verified."""
    return sorted((run / "checkpoints").glob("step_" + "[0-9]" * 8), reverse=True)


def latest(run: Path) -> Path | None:
    """The newest checkpoint whose every byte is as it was written, None if there is none. For a single process."""
    return next((folder for folder in checkpoints(run) if not problem(folder)), None)


def best(run: Path) -> Path | None:
    """The sound checkpoint with the lowest held-out loss, None if none has one. For a single process."""
    return next((folder for folder in _by_loss(run) if not problem(folder)), None)


def step_of(checkpoint: Path) -> int:
    """Steps that were done when it was written."""
    return int(checkpoint.name.removeprefix("step_"))


def problem(checkpoint: Path, rank: int = 0, ranks: int = 1) -> str:
    """What is wrong with the checkpoint, "" if nothing is. Each of `ranks` hashes its share of the files."""
    return manifest.problem(checkpoint, step_of(checkpoint), rank, ranks)


def restore(run: Path, model: nn.Module, optimizer: Optimizer, note=print) -> int:
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


def state_of(model: nn.Module, optimizer: Optimizer) -> State:
    """Trained parameters and their optimizer state under flat names, sharing memory with the live ones."""
    state: State = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            state[MODEL + name] = parameter.detach()
            for key, value in optimizer.state[parameter].items():
                state[f"{OPTIMIZER}{name}.{key}"] = value
    for name, buffer in model.named_buffers():
        if getattr(buffer, "moves", False):  # a selection bias that balancing moves
            state[MODEL + name] = buffer
    return state


def _load(folder: Path, model: nn.Module, optimizer: Optimizer) -> None:
    saved = FileSystemReader(folder).read_metadata().state_dict_metadata
    for name, parameter in model.named_parameters():
        if f"{OPTIMIZER}{name}.step" in saved and parameter.requires_grad:
            optimizer.prepare(parameter)
    state = state_of(model, optimizer)
    wrong = _difference(state, saved)
    if not wrong:
        try:
            state_dict_loader.load(state, checkpoint_id=str(folder))
        except CheckpointException as error:  # a BaseException
            wrong = _cause(error)
    if wrong:
        raise InputError(
            str(folder),
            found=wrong,
            expected="the parameters of this package and these settings",
            hint="Resume with the settings the run was started with.",
        )


def _difference(state: State, saved: Mapping[str, Any]) -> str:
    """What one side has and the other does not: a load alone would overlook more tensors, or another dtype."""
    for name in sorted(saved.keys() ^ state.keys()):
        return f"{name}, which this run does not have" if name in saved else f"nothing saved for {name}"
    for name, value in state.items():
        dtype = saved[name].properties.dtype
        if dtype != value.dtype:
            return f"{dtype} for {name}, which this run keeps in {value.dtype}"
    return ""


def _names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def _start(partial: Path) -> None:
    """An empty hidden folder; what earlier saves and removals left behind, killed halfway, goes."""
    for left in partial.parent.glob(".step_*"):
        shutil.rmtree(left, ignore_errors=True)
    partial.mkdir(parents=True)


def _remove(folder: Path) -> None:
    hidden = folder.with_name(f".{folder.name}.removed")
    with suppress(OSError):
        folder.rename(hidden)
        shutil.rmtree(hidden)


def _superfluous(run: Path, keep: int, keep_best: int) -> list[Path]:
    kept = {*checkpoints(run)[:keep], *_by_loss(run)[:keep_best]}
    return [folder for folder in checkpoints(run) if folder not in kept]


def _by_loss(run: Path) -> list[Path]:
    """Checkpoints with a held-out loss, lowest first, the newer one first where two are equal."""
    losses = {}
    for folder in checkpoints(run):
        with suppress(ValueError):
            losses[folder] = manifest.read(folder).get("held_out_loss")
    return sorted((folder for folder, loss in losses.items() if loss is not None), key=lambda folder: losses[folder])


def _why(error: OSError, partial: Path, state: State) -> str:
    """The error in a line; a full disk by its name, which torch's writer hides behind a position in its file."""
    text, needed = str(error), sum(local(value).nbytes for value in state.values())
    with suppress(OSError):
        free = shutil.disk_usage(partial if partial.exists() else partial.parent).free
        if free < needed and "No space left" not in text:
            return f"No space left on device: {free} bytes free for {needed} or more ({text})"
    return text


def _cause(error: CheckpointException) -> str:
    """What went wrong on the first rank that failed, in one line."""
    first = next(iter(error.failures.values()))[0]
    return " ".join(str(first).split())[:300]


def _together(work: Callable[[], Any], group: ProcessGroup | None) -> list[Any]:
    """work() of every rank. Raises OSError on all of them if it was raised on one."""
    try:
        value, failed = work(), None
    except OSError as error:
        value, failed = None, str(error)
    results = _each_rank((value, failed), group)
    for _, text in results:
        if text is not None:
            raise OSError(text)
    return [result for result, _ in results]


def _each_rank(value: Any, group: ProcessGroup | None = None) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(values, value, group=group)
    return values
