"""Puts a rendered package in its place: all of it or nothing, a person's own files kept."""

import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from dayzero.runtime.errors import InputError

KEPT = ("decisions.yaml", "custom")  # written once, then a person's own
LINK = "checkpoint"  # local link to the checkpoint; not part of the package

_DECISIONS = """\
# Decisions of a person, replayed by every run of onboard. Yours to edit; nothing here is generated again.
# ignore_config: config fields that onboarding may leave unexplained, each with the reason, such as
#   my_field: "only read by the tokenizer"
ignore_config: {}
"""
_CUSTOM = """\
Hand-written code for this package. `onboard` never writes here again and never deletes it.

What stands in operators/NAME.py for a lifted class runs NAME.py of this folder where there is one; the file there says
what it must compute. `onboard align` judges it, and tests/test_lifted.py compares it with the class.
"""


def write_files(folder: Path, files: Mapping[str, str]) -> None:
    """Writes every file below `folder`."""
    for name, text in files.items():
        file = folder / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")


def install(target: Path, files: Mapping[str, str], checkpoint: Path | None) -> None:
    """Makes `target` hold exactly these files, beside what is kept, by one rename. Raises InputError for a folder that
    is there and is no package."""
    refuse_foreign(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        staging.chmod(0o755)
        write_files(staging, files)
        for name in KEPT:
            if (target / name).is_dir():
                shutil.copytree(target / name, staging / name, symlinks=True)
            elif (target / name).is_file():
                shutil.copy2(target / name, staging / name)
        if not (staging / "decisions.yaml").exists():
            (staging / "decisions.yaml").write_text(_DECISIONS)
        if not (staging / "custom").exists():
            write_files(staging, {"custom/README.md": _CUSTOM})
        if checkpoint is not None:
            (staging / LINK).symlink_to(checkpoint, target_is_directory=True)
        if target.exists():
            old = Path(tempfile.mkdtemp(prefix=f".{target.name}.old.", dir=target.parent))
            os.replace(target, old / target.name)
            os.replace(staging, target)
            shutil.rmtree(old)
        else:
            os.replace(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def refuse_foreign(target: Path) -> None:
    """Raises InputError if `target` holds something that onboarding did not write, or cannot be written."""
    parent = next(parent for parent in target.absolute().parents if parent.exists())
    if not parent.is_dir() or not os.access(parent, os.W_OK | os.X_OK):
        raise InputError(
            str(parent),
            found="a folder that may not be written" if parent.is_dir() else "a file",
            expected="a folder for packages",
            hint="Choose another place with -o.",
        )
    if (
        target.exists()
        and not (target / "onboard.lock").is_file()
        and any(target.iterdir() if target.is_dir() else [1])
    ):
        raise InputError(
            str(target),
            found="a folder without onboard.lock" if target.is_dir() else "a file",
            expected="a package that onboard wrote, or nothing",
            hint="Choose another name with --name, or another place with -o.",
        )


def read_decisions(folder: Path) -> dict[str, Any]:
    """The decisions of a package that may already be there. Raises InputError for a file that is not what it says."""
    file = folder / "decisions.yaml"
    if not file.is_file():
        return {}
    try:
        decisions = yaml.safe_load(file.read_text()) or {}
    except yaml.YAMLError as error:
        raise InputError(str(file), found=" ".join(str(error).split()), expected="YAML") from None
    ignored = decisions.get("ignore_config") if isinstance(decisions, dict) else None
    if not isinstance(decisions, dict) or decisions.keys() - {"ignore_config"} or not isinstance(ignored or {}, dict):
        raise InputError(str(file), found=str(decisions)[:80], expected="ignore_config: {field: reason}")
    return decisions


def compare(folder: Path, files: Mapping[str, str]) -> list[str]:
    """Differences between a package and what it should hold, one line a file, [] for none."""
    lines = []
    for name, text in sorted(files.items()):
        file = folder / name
        if not file.is_file():
            lines.append(f"{name}: missing")
        elif file.read_bytes() != text.encode():
            found, expected = (hashlib.sha256(data).hexdigest()[:12] for data in (file.read_bytes(), text.encode()))
            lines.append(f"{name}: changed (sha256 {found}, expected {expected})")
    for file in sorted(folder.rglob("*")):
        name = file.relative_to(folder).as_posix()
        ours = name.split("/")[0] in {*KEPT, LINK} or "__pycache__" in name or ".pytest_cache" in name
        if file.is_file() and not ours and name not in files:
            lines.append(f"{name}: not generated")
    return lines


def read_lock(folder: Path) -> dict[str, Any]:
    """The lock of a package. Raises InputError if there is none."""
    file = folder / "onboard.lock"
    if not file.is_file():
        is_checkpoint = (folder / "config.json").is_file()
        raise InputError(
            str(folder),
            found="a checkpoint" if is_checkpoint else "no onboard.lock" if folder.is_dir() else "no such folder",
            expected="a package that onboard wrote",
            hint=f"Make one of it: onboard {folder}" if is_checkpoint else "Packages are written to generated/NAME.",
        )
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise InputError(str(file), found=str(error), expected="JSON") from None
