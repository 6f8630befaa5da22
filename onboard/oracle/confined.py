"""The jobs that need a checkpoint's own code, done in the sandbox; what they leave is checked here before it is used.

The code is never imported in this process. A package that comes out is accepted only if rendering its own data again
gives the same bytes, if it is of the checkpoint that lies here, and if its lifted source imports nothing but
arithmetic. What it says about proofs is as good as the code that was trusted.
"""

import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dayzero.onboard.agent import Outcome, Progress, Run
from dayzero.onboard.align import Alignment
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.install import KEPT, LINK, install
from dayzero.onboard.oracle import sandbox
from dayzero.onboard.package import check_package
from dayzero.onboard.specify import Tried
from dayzero.runtime.errors import InputError, RunFailed
from dayzero.runtime.nn.lifted_source import check_source
from dayzero.runtime.spec import ModelSpec

_LARGEST = 64_000_000  # bytes of one file of a package
_FOLDER, _PACKAGES = ".sandbox", "packages"  # beside the packages: what the sandbox may write to, and below it


def execute_confined(run: Run, unsafe: bool = False) -> Iterator[Progress | Outcome]:
    """`agent.execute`, in the sandbox. The package takes its place only when it is complete and checked."""
    folder = _staging(run.target.parent, run.name, keep=True)
    _copy_kept(run.target, folder / _PACKAGES / run.name)
    request = {"job": "run", "devices": run.devices, "hbm": run.hbm, "align": run.align}
    done: dict[str, Any] = {}
    for item in _items(request, run.checkpoint, folder, run.name, unsafe):
        if "progress" in item:
            yield Progress.model_validate(item["progress"])
        elif "done" in item:
            done = item["done"]
    try:
        outcome = Outcome.model_validate({**done, "package": str(run.target)})
    except ValidationError:
        raise RunFailed("the sandbox ended without an outcome") from None
    if not outcome.unproven:
        _accept(folder / _PACKAGES / run.name, run.target, run.checkpoint)
    shutil.rmtree(folder, ignore_errors=True)
    _drop_empty(folder.parent)
    _drop_empty(run.target.parent)
    yield outcome


def align_confined(
    package: Path, checkpoint: Path, tell: Callable[[str], None], unsafe: bool = False
) -> tuple[Alignment, list[Tried]]:
    """`package.align_package`, in the sandbox."""
    folder = _staging(package.parent, package.name)
    shutil.copytree(package, folder / _PACKAGES / package.name, symlinks=True)
    done: dict[str, Any] = {}
    for item in _items({"job": "align"}, checkpoint, folder, package.name, unsafe):
        if "line" in item:
            tell(str(item["line"]))
        done = item.get("done", done)
    try:
        alignment = Alignment.model_validate(done.get("alignment"))
        tried = [Tried.model_validate(one) for one in done.get("tried", [])]
    except ValidationError:
        raise RunFailed("the sandbox ended without an alignment") from None
    _accept(folder / _PACKAGES / package.name, package, checkpoint)
    shutil.rmtree(folder, ignore_errors=True)
    _drop_empty(folder.parent)
    return alignment, tried


def specify_confined(checkpoint: Path, name: str, tell: Callable[[str], None], unsafe: bool = False) -> ModelSpec:
    """The specification of a checkpoint, found in the sandbox; nothing is kept."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        done = None
        for item in _items({"job": "specify"}, checkpoint, Path(folder), name, unsafe):
            if "line" in item:
                tell(str(item["line"]))
            done = item.get("done", done)
    try:
        return ModelSpec.model_validate(done)
    except ValidationError:
        raise RunFailed("the sandbox ended without a specification") from None


def _items(request: dict[str, Any], checkpoint: Path, folder: Path, name: str, unsafe: bool) -> Iterator[dict]:
    """The objects that the job says, one a line; lines that are none are left out. Raises what it ends with."""
    from dayzero.onboard.prove.proven import NotProven, Unproven

    packages = folder.resolve() / _PACKAGES  # not the folder itself: inside, that can be emptied but not removed
    request = {**request, "checkpoint": str(checkpoint.resolve()), "folder": str(packages), "name": name}
    argv = [sys.executable, "-P", "-m", "dayzero.onboard.oracle.inside", json.dumps(request)]
    seen = [*sandbox.python_folders(), *sandbox.checkpoint_folders(checkpoint)]
    try:
        for line in sandbox.lines(argv, seen, folder.resolve(), unsafe=unsafe):
            try:
                item = json.loads(line)
            except ValueError:
                continue
            if not isinstance(item, dict):
                continue
            if isinstance(refused := item.get("refused"), dict):
                fields = {key: _text(refused.get(key)) for key in ("found", "expected", "hint")}
                raise InputError(_text(refused.get("where")), **fields)
            if isinstance(unproven := item.get("unproven"), list):
                items = [entry for entry in unproven if isinstance(entry, dict)]
                raise NotProven(
                    [
                        Unproven(
                            _text(e.get("where")),
                            _text(e.get("why")),
                            [_text(t) for t in e.get("tried") or []],
                            _text(e.get("todo")),
                            [_text(t) for t in e.get("also") or []],
                            _text(e.get("layers")),
                        )
                        for e in items
                    ]
                )
            yield item
    except sandbox.Stopped as stopped:
        raise RunFailed(f"the checkpoint's code was stopped: {_text(str(stopped))}") from None


def _text(value: Any) -> str:
    """Text of the sandbox that cannot steer a terminal."""
    text = str(value or "")[:2000]
    return "".join(letter if letter.isprintable() else " " for letter in text)


def _staging(out: Path, name: str, keep: bool = False) -> Path:
    """The folder that the sandbox may write to. keep: with what an interrupted run left there."""
    folder = out / _FOLDER / name
    if folder.is_symlink() or (folder.exists() and not keep):
        shutil.rmtree(folder) if not folder.is_symlink() else folder.unlink()
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _drop_empty(folder: Path) -> None:
    if folder.is_dir() and not any(folder.iterdir()):
        folder.rmdir()


def _copy_kept(target: Path, staged: Path) -> None:
    """A person's own files and the lock of a package that is there already: decisions are replayed."""
    shutil.rmtree(staged, ignore_errors=True)
    if not (target / "onboard.lock").is_file():
        return
    staged.mkdir(parents=True)
    shutil.copy2(target / "onboard.lock", staged / "onboard.lock")
    for name in KEPT:
        if (target / name).is_dir():
            shutil.copytree(target / name, staged / name, symlinks=True)
        elif (target / name).is_file():
            shutil.copy2(target / name, staged / name)


def _accept(staged: Path, target: Path, checkpoint: Path) -> None:
    """Puts the staged package in its place. Raises RunFailed where it is not what its own data gives."""
    files = _files(staged)
    differences = check_package(staged)
    if differences:
        raise RunFailed(f"what came out of the sandbox is no package: {_text(differences[0])}")
    spec = ModelSpec.model_validate_json(files["spec.json"])
    if spec.checkpoint != read_checkpoint(checkpoint).identity():
        raise RunFailed("what came out of the sandbox is of another checkpoint")
    try:
        check_source(spec.lifted)
    except ValueError as error:
        raise RunFailed(f"lifted source that came out of the sandbox is refused: {_text(error)}") from None
    install(target, files, checkpoint.resolve())


def _files(staged: Path) -> dict[str, str]:
    """Name -> text of a staged package's own files. Raises RunFailed for what no package has."""
    files: dict[str, str] = {}
    for folder, folders, names in os.walk(staged):
        inside = Path(folder).relative_to(staged)
        if inside == Path("."):
            folders[:] = [name for name in folders if name not in {*KEPT, LINK, "__pycache__"}]
            names = [name for name in names if name not in {*KEPT, LINK}]
        for name in names:
            file = Path(folder) / name
            if file.is_symlink() or not file.is_file() or file.stat().st_size > _LARGEST:
                raise RunFailed(f"what came out of the sandbox holds {_text(inside / name)}, which no package has")
            if "__pycache__" not in inside.parts:
                files[(inside / name).as_posix()] = file.read_text(encoding="utf-8")
        if any((Path(folder) / name).is_symlink() for name in folders):
            raise RunFailed("what came out of the sandbox holds a link to a folder")
    if "spec.json" not in files:
        raise RunFailed("what came out of the sandbox is no package: it has no spec.json")
    return files
