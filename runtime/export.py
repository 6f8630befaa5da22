"""From a training run to what other tools load: a Hugging Face checkpoint, or a PEFT adapter."""

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from dayzero.runtime import checkpointing
from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import read_file_headers, read_headers
from dayzero.runtime.hf_checkpoint import write_checkpoint
from dayzero.runtime.load import check_same_checkpoint
from dayzero.runtime.lora import merge
from dayzero.runtime.package import Package, load_package
from dayzero.runtime.peft_adapter import write_adapter
from dayzero.runtime.safetensors_reader import SafetensorsReader
from dayzero.runtime.weights import BoundRule, Shape, bind

ADAPTER = "adapter"
A, B = ".lora_a", ".lora_b"


class ExportReport(BaseModel):
    """kind: what `out` holds. step: the training step it is from. tensors, bytes: all that were written.

    changed: the source's tensors that were trained; of an adapter, the modules that it adapts. requantised: trained
    weights that were stored in the source's quantised format again, and worst_rounding: the largest relative error
    ||stored - trained|| / ||trained|| that this cost one of them.
    """

    model_config = ConfigDict(extra="forbid")

    out: str
    kind: Literal["full", "merged", "base+adapter", "adapter"]
    step: int
    tensors: int
    changed: int
    bytes: int
    requantised: int = 0
    worst_rounding: float = 0.0


@dataclass(frozen=True)
class Trained:
    """What a run learned. values: trained parameters by name, read on demand. rank, alpha, dropout: of its adapters."""

    package: Package
    checkpoint: Path
    values: Mapping[str, Tensor]
    rank: int
    alpha: float
    dropout: float

    @property
    def adapted(self) -> list[str]:
        """Names of the adapted modules, [] after full fine-tuning."""
        return [name.removesuffix(A) for name in self.values if name.endswith(A)]

    @cached_property
    def _rules(self) -> dict[str, BoundRule]:
        return bind(self.package.rules)

    @cached_property
    def _shapes(self) -> dict[str, Shape]:
        return {name: header.shape for name, header in read_headers(self.checkpoint).items()}

    def merged(self, parameter: str) -> Tensor:
        """The parameter as trained: as it is, or base + alpha/rank B A in the base's dtype."""
        module = parameter.removesuffix(".weight")
        if module + A not in self.values:
            return self.values[parameter]
        base = self._rules[parameter].read(SafetensorsReader(self.checkpoint), self._shapes)
        return merge(base, self.values[module + A], self.values[module + B], self.alpha / self.rank)


def export(
    run: Path, out: Path, *, merged: bool = True, adapter: bool = False, requantise: bool = False, best: bool = False
) -> ExportReport:
    """Writes the newest sound training checkpoint of `run` to the new folder `out`; with `best`, the one with the
    lowest held-out loss.

    After full fine-tuning, and after LoRA with `merged`: a checkpoint with the source's names, shapes, dtypes and
    files, whose untrained tensors are the source's bytes. adapter: the PEFT adapter alone. merged=False: the source
    checkpoint as it was, with the PEFT adapter in its subfolder adapter/. requantise: trained weights that the source
    stores quantised may be rounded to its format again; without it they are refused.

    The folder takes its name only when complete. Raises InputError for a folder that is not empty, a run without a
    sound checkpoint, or one with a held-out loss or adapters where these are wanted, and a source that is not the one
    that was trained.
    """
    trained, step = _read_run(run, best)
    if (adapter or not merged) and not trained.adapted:
        option = "--adapter" if adapter else "--no-merge"
        raise InputError(option, found=f"{run}, which trained every parameter", expected="a run with train.mode=lora")
    costs: list[float] = []
    with new_folder(out) as folder:
        if adapter:
            kind, changed = "adapter", _adapter(trained, folder)
        elif not merged:
            kind = "base+adapter"
            write_checkpoint(folder, trained.checkpoint, trained.package.rules, [], trained.merged)
            (folder / ADAPTER).mkdir()
            changed = _adapter(trained, folder / ADAPTER)
        else:
            kind = "merged" if trained.adapted else "full"
            names = [f"{module}.weight" for module in trained.adapted] or list(trained.values)
            tell = (lambda name, cost: costs.append(cost.relative)) if requantise else None
            rules = trained.package.rules
            changed = len(write_checkpoint(folder, trained.checkpoint, rules, names, trained.merged, tell))
        files = list(folder.rglob("*.safetensors"))
        tensors = sum(len(read_file_headers(file)) for file in files)
        size = sum(file.stat().st_size for file in files)
    return ExportReport(
        out=str(out),
        kind=kind,
        step=step,
        tensors=tensors,
        changed=changed,
        bytes=size,
        requantised=len(costs),
        worst_rounding=max(costs, default=0.0),
    )


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder to fill, which takes the name `out` once filled: a failure leaves nothing behind.

    Raises InputError if `out` is a file or a folder that is not empty.
    """
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise InputError(
            str(out),
            found="it exists and is not empty",
            expected="a new folder",
            hint="Nothing is overwritten: remove it, or choose another name.",
        )
    partial = out.absolute().with_name(f".{out.absolute().name}.partial-{os.getpid()}")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(out.absolute())
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _read_run(run: Path, best: bool) -> tuple[Trained, int]:
    """(what was trained, after how many steps)."""
    try:
        record: dict[str, Any] = json.loads((run / "run.json").read_text())
    except (OSError, ValueError) as error:
        found = "no run.json" if run.is_dir() else "no such folder"
        found = found if isinstance(error, FileNotFoundError) else f"a run.json that cannot be read ({error})"
        raise InputError(str(run), found=found, expected="the folder of a run: runtime train ... --run RUN") from None
    package = load_package(Path(record["package"]), Path(record["checkpoint"]) if record["checkpoint"] else None)
    if package.checkpoint is None:
        raise InputError(
            str(run), found="no source checkpoint", expected="the one the weights came from", hint="Pass --checkpoint."
        )
    check_same_checkpoint(package.checkpoint, read_headers(package.checkpoint), package.spec.checkpoint)
    saved = checkpointing.best(run) if best else checkpointing.latest(run)
    if saved is None and best and checkpointing.latest(run) is not None:
        raise InputError(
            "--best",
            found="no checkpoint with a held-out loss",
            expected="a run with --eval-data and checkpoint.keep_best",
            hint="Without --best the newest checkpoint is taken.",
        )
    if saved is None:
        raise InputError(
            str(run / "checkpoints"),
            found="no complete checkpoint",
            expected="at least one",
            hint="Train at least until the first: checkpoint.every.",
        )
    lora = record["config"]["lora"]
    values = checkpointing.load_full(saved)
    trained = Trained(package, package.checkpoint, values, lora["rank"], lora["alpha"], lora["dropout"])
    return trained, checkpointing.step_of(saved)


def _adapter(trained: Trained, folder: Path) -> int:
    adapters = {module: (trained.values[module + A], trained.values[module + B]) for module in trained.adapted}
    settings = (trained.rank, trained.alpha, trained.dropout)
    return len(write_adapter(folder, trained.checkpoint, trained.package.rules, adapters, *settings))
