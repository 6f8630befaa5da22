"""Model code that ships with a checkpoint: which files it is, what it is called by, and how it is imported.

It is imported by explicit permission only (`--trust-remote-code`), from the checkpoint's folder alone, and in a process
of its own (`oracle.sandbox`): `using` says in that process that it may be.
"""

import contextlib
import hashlib
import importlib
import importlib.machinery
import re
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dayzero.runtime.errors import InputError
from dayzero.runtime.shards import check_inside
from dayzero.runtime.strict_json import shown

# What config.json may call a model that predicts the next token, the surest first.
_MODELS = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForVision2Seq", "AutoModelForSeq2SeqLM")
CHECKPOINT_PACKAGE = "checkpoint_code_"  # begins the name under which a checkpoint's folder is imported
_REFERENCE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)+", re.ASCII)


@dataclass(frozen=True)
class RemoteCode:
    """folder: the checkpoint's. config, model: "module.Class" as config.json names them, config "" for none."""

    folder: Path
    config: str
    model: str

    def config_class(self) -> type | None:
        return _load(self.folder, self.config) if self.config else None

    def model_class(self) -> type:
        return _load(self.folder, self.model)


def remote_code(folder: Path, config: Mapping[str, Any]) -> RemoteCode | None:
    """The code that config.json's `auto_map` names, None where it names no model.

    Raises InputError for a name that is no class of a Python file in the folder, such as one in another repository.
    """
    named = config.get("auto_map")
    if not isinstance(named, Mapping):
        return None
    model = next((named[key] for key in _MODELS if key in named), None)
    if model is None:
        return None
    chosen = {"config": named.get("AutoConfig") or "", "model": model}
    for value in chosen.values():
        if value:
            _check(folder, value)
    code = RemoteCode(folder, chosen["config"], chosen["model"])
    for name in files_to_run(folder, code):
        check_inside(folder, name)
    return code


def _check(folder: Path, value: Any) -> None:
    where = f"{folder / 'config.json'}: auto_map"
    if not isinstance(value, str) or not _REFERENCE.fullmatch(value):
        raise InputError(
            where,
            found=shown(value),
            expected="file.Class of a Python file in this folder",
            hint="Code of another repository is never fetched: put it beside the weights and name it there."
            if isinstance(value, str) and "--" in value
            else "",
        )
    file = _file(folder, value)
    if not file.is_file():
        raise InputError(where, found=f"{value}, but no {file.name}", expected="the file that it names")


def _file(folder: Path, value: str) -> Path:
    return folder.joinpath(*value.split(".")[:-1]).with_suffix(".py")


def files_to_run(folder: Path, code: RemoteCode) -> list[str]:
    """The Python files that importing the code may run, by name: those named, and what they import from the folder."""
    todo = [_file(folder, value) for value in (code.config, code.model) if value]
    found: list[str] = []
    while todo:
        file = todo.pop(0)
        name = file.relative_to(folder).as_posix()
        if name in found or not file.is_file():
            continue
        found.append(name)
        for match in re.finditer(r"^\s*(?:from|import)\s+\.([\w.]*)(?:\s+import\s+([\w, ]+))?", file.read_text(), re.M):
            modules = [match[1]] if match[1] else [part.strip() for part in (match[2] or "").split(",")]
            todo += [file.parent.joinpath(*module.split(".")).with_suffix(".py") for module in modules if module]
    return sorted(found)


def _package(folder: Path) -> str:
    """The name under which the folder is a package of this process. Relative imports stay inside it."""
    name = f"{CHECKPOINT_PACKAGE}{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:8]}"
    if name not in sys.modules:
        package = types.ModuleType(name)
        package.__path__ = [str(folder)]
        package.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
        sys.modules[name] = package
    return name


def _load(folder: Path, value: str) -> type:
    """The class. Raises InputError where the code cannot be imported here."""
    module_name, _, name = value.rpartition(".")
    where = str(_file(folder, value))
    try:
        module = importlib.import_module(f"{_package(folder)}.{module_name}")
    except ModuleNotFoundError as error:
        raise InputError(
            where,
            found=f"it imports {error.name}, which is not installed",
            expected="code that imports what is here",
            hint=f"Install {str(error.name).split('.')[0]}, or a version of transformers that this code is for.",
        ) from None
    except Exception as error:  # whatever code of a checkpoint raises when it is imported
        found = f"it does not run when imported: {type(error).__name__}: {str(error)[:200]}"
        raise InputError(
            where,
            found=" ".join(found.split()),
            expected="code for this version of transformers",
            hint="Code that ships with a checkpoint is often written for an older one.",
        ) from None
    made = getattr(module, name, None)
    if not isinstance(made, type):
        raise InputError(where, found=f"no class {name}", expected=f"the class that config.json names: {value}")
    return made


_current: list[RemoteCode] = []


def current() -> RemoteCode | None:
    """The code that this process may run, None for none."""
    return _current[-1] if _current else None


@contextlib.contextmanager
def using(code: RemoteCode | None) -> Iterator[None]:
    """References are built from this code. Only a process that runs it on purpose says so."""
    if code is None:
        yield
        return
    _current.append(code)
    try:
        yield
    finally:
        _current.pop()
