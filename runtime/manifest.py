"""The manifest of a checkpoint: the size and hash of its every file, and of itself."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

FILE = "manifest.json"
Hashes = dict[str, tuple[int, str]]  # name -> (bytes, sha256)


def hashes(folder: Path, names: list[str]) -> Hashes:
    """Of the files `names` in `folder`."""
    found = {}
    for name in names:
        with (folder / name).open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
            found[name] = (stream.tell(), digest)
    return found


def write(folder: Path, step: int, files: Hashes, **more: Any) -> None:
    """Writes it, through to the disk. more: what else is known of the checkpoint."""
    content = {"step": step, "files": files, **more}
    content["sha256"] = _digest(content)
    with (folder / FILE).open("w") as stream:
        json.dump(content, stream, indent=1, sort_keys=True)
        stream.flush()
        os.fsync(stream.fileno())
    sync_folder(folder)


def read(folder: Path) -> dict[str, Any]:
    """Raises ValueError for one that is missing, is not JSON, or is not as it was written."""
    try:
        content = json.loads((folder / FILE).read_text())
        digest = content.pop("sha256", None)
        if digest != _digest(content):
            raise ValueError("it has changed since it was written")
        return content
    except (OSError, ValueError, AttributeError) as error:
        raise ValueError(f"{folder / FILE}: {type(error).__name__}: {error}") from None


def problem(folder: Path, step: int, rank: int = 0, ranks: int = 1) -> str:
    """What is wrong with the checkpoint of `step`, "" if nothing is. Each of `ranks` hashes its share of the files."""
    try:
        content = read(folder)
    except ValueError as error:
        return str(error)
    files: Hashes = content["files"]
    if content["step"] != step:
        return f"{folder}: it was written as the checkpoint of step {content['step']}"
    for name, (size, _) in files.items():
        path = folder / name
        if not path.is_file() or path.stat().st_size != size:
            found = f"{path.stat().st_size} bytes" if path.is_file() else "no such file"
            return f"{path}: {found}, expected {size} bytes"
    for name, (_, digest) in hashes(folder, sorted(files)[rank::ranks]).items():
        if digest != files[name][1]:
            return f"{folder / name}: its bytes have changed since it was written"
    return ""


def sync_folder(folder: Path) -> None:
    """Makes new names in a folder survive a loss of power, where the file system can."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:  # some network file systems cannot
        pass
    finally:
        os.close(descriptor)


def _digest(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
