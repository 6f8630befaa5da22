"""Which file of a checkpoint folder holds which tensor, by its index."""

from pathlib import Path

from dayzero.runtime.errors import InputError
from dayzero.runtime.strict_json import read_object, shown

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
LONGEST_INDEX = 250_000_000  # bytes; two trillion parameters in half a million tensors take 50 million


def read_index(folder: Path) -> dict[str, str] | None:
    """Tensor name -> file name, None for a folder whose one file needs no index.

    Raises InputError for a folder without safetensors, an index that names a file outside the folder, a shard that is
    missing, or one that is a link out of the folder.
    """
    index = folder / INDEX
    if index.exists() or index.is_symlink():
        return _weight_map(folder)
    if (folder / SINGLE).is_file():
        check_inside(folder, SINGLE)
        return None
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
        found=f"no {SINGLE} and no {INDEX}" if folder.is_dir() else "no such folder",
        expected="a Hugging Face checkpoint folder",
    )


def _weight_map(folder: Path) -> dict[str, str]:
    index = folder / INDEX
    if not index.is_file():
        raise InputError(str(index), found="no file, or a link to none", expected="the index of the shards")
    check_inside(folder, INDEX)
    weight_map = read_object(index, LONGEST_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(str(index), found=f"weight_map {shown(weight_map)}", expected="tensor -> file")
    if set(map(type, weight_map.values())) != {str} or not all(map(_is_file_name, set(weight_map.values()))):
        name = next(name for name, file in weight_map.items() if not isinstance(file, str) or not _is_file_name(file))
        raise InputError(
            f"{index}: {shown(name)[1:-1]}",
            found=f"file {shown(weight_map[name])}",
            expected="the name of a file inside the checkpoint folder",
            hint="An index that points elsewhere is refused: it could read any file of this machine.",
        )
    for file in sorted(set(weight_map.values())):
        check_inside(folder, file)
        if not (folder / file).is_file():
            missing = sum(1 for shard in weight_map.values() if shard == file)
            raise InputError(
                str(folder / file),
                found="no such file",
                expected=f"a shard with {missing} tensors that {INDEX} lists",
                hint="Download it again; nothing was written.",
            )
    return weight_map


def _is_file_name(file: str) -> bool:
    """A plain name: no folder, nothing a terminal or the system would take for something else."""
    return file.isprintable() and len(file) <= 255 and Path(file).name == file and file not in {"", ".", ".."}


def check_inside(folder: Path, file: str) -> None:
    """Raises InputError for a link that leads out of the folder, unless to where the Hub's cache keeps the content:
    snapshots/REVISION/FILE links to blobs/HASH."""
    if not (folder / file).is_symlink():
        return
    try:
        home, target = folder.resolve(), (folder / file).resolve()
    except (OSError, RuntimeError):  # a circle of links
        raise InputError(str(folder / file), found="a circle of links", expected="a file") from None
    if target.parent not in {home, home.parent.parent / "blobs"}:
        raise InputError(
            str(folder / file),
            found=f"a link to {target}",
            expected="a file inside the checkpoint folder",
            hint="A link that leads elsewhere is refused: it could read any file of this machine. Copy the file here.",
        )
