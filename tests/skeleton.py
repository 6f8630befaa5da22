"""Checkpoints of any size as skeletons: true headers, index and config, tensors that are holes in sparse files.

A manifest (tests/data/manifests/NAME.tsv) has one line a tensor-name pattern: pattern, shape, dtype, layers, experts.
`{L}` and `{E}` stand for the numbers of the last two columns: `0-2, 6-78:4` counts 0, 1, 2, 6, 10, ..., 78.

    folder = skeleton.make("Kimi-K3", tmp_path)       # 1.56 TB by its headers, 90 MB on disk
    folder = skeleton.write([("w", [2, 3], "F32")], tmp_path, config={...})
    found = skeleton.checkpoint("Kimi-K3", tie_word_embeddings=True)    # without files
"""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from dayzero.onboard.checkpoint import Checkpoint
from dayzero.runtime.headers import TensorHeader

DATA = Path(__file__).parent / "data"
NAMES = sorted(file.stem for file in (DATA / "manifests").glob("*.tsv"))
BITS = {
    "BF16": 16, "F16": 16, "F32": 32, "F64": 64, "F8_E4M3": 8, "F8_E8M0": 8, "U8": 8, "I8": 8, "I32": 32, "I64": 64
}  # fmt: skip
INDEX = "model.safetensors.index.json"

Tensor = tuple[str, list[int], str]  # name, shape, dtype


def numbers(text: str) -> list[int]:
    """`0-2, 6-78:4` -> 0, 1, 2, 6, 10, ..., 78."""
    found = []
    for part in text.replace(" ", "").split(","):
        bounds, _, step = part.partition(":")
        low, _, high = bounds.partition("-")
        found.extend(range(int(low), int(high or low) + 1, int(step or 1)))
    return found


def rows(name: str) -> Iterator[tuple[str, list[int], str, list[int | None], list[int | None]]]:
    """The lines of a manifest: pattern, shape, dtype, layers, experts; [None] where a pattern has no such number."""
    for line in (DATA / "manifests" / f"{name}.tsv").read_text().splitlines():
        if line and not line.startswith("#"):
            pattern, shape, dtype, layers, experts = (*line.split("\t"), "", "")[:5]
            counted = [numbers(text) if text else [None] for text in (layers, experts)]
            yield pattern, json.loads(shape), dtype, *counted


def tensors(name: str) -> list[Tensor]:
    """Every tensor of a manifest, layer by layer."""
    found = []
    for number, (pattern, shape, dtype, layers, experts) in enumerate(rows(name)):
        for layer in layers:
            for expert in experts:
                full = pattern.replace("{L}", str(layer)).replace("{E}", str(expert))
                found.append(((-1 if layer is None else layer, expert or 0, number), (full, shape, dtype)))
    found.sort(key=lambda item: item[0])
    return [tensor for _, tensor in found]


def config(name: str) -> dict[str, Any]:
    """The config.json that belongs to a manifest."""
    return json.loads((DATA / "configs" / f"{name}.json").read_text())


def size(shape: Iterable[int], dtype: str) -> int:
    """Bytes of a tensor."""
    count = BITS[dtype]
    for dim in shape:
        count *= dim
    return count // 8


def make(name: str, folder: Path, **changes: Any) -> Path:
    """The skeleton of a manifest, with its config; changes: config fields to replace, or to leave out where `...`."""
    return write(tensors(name), folder, config={**config(name), **changes})


def checkpoint(name: str, listed: Iterable[Tensor] | None = None, **changes: Any) -> Checkpoint:
    """What reading the skeleton would give, without files. listed: other tensors than the manifest's; changes: as in
    `make`."""
    headers, end = {}, 0
    for tensor, shape, dtype in tensors(name) if listed is None else listed:
        start, end = end, end + size(shape, dtype)
        headers[tensor] = TensorHeader(dtype, tuple(shape), "model.safetensors", start, end)
    held = {field: value for field, value in {**config(name), **changes}.items() if value is not ...}
    quantization = held.get("quantization_config") or held.get("text_config", {}).get("quantization_config") or {}
    return Checkpoint(
        path=DATA,
        config=held,
        generation_config={},
        headers={tensor: headers[tensor] for tensor in sorted(headers)},
        quantization=quantization,
        tokenizer=[],
        remote_code=[],
    )


def write(listed: Iterable[Tensor], folder: Path, config: dict[str, Any], shard_bytes: int = 16_000_000_000) -> Path:
    """Shards of at most about `shard_bytes`, the index and config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    kept = {name: value for name, value in config.items() if value is not ...}
    (folder / "config.json").write_text(json.dumps(kept))
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in listed:
        length = size(*tensor[1:])
        if shards[-1] and filled + length > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += length
    weight_map, total = {}, 0
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):06d}.safetensors"
        total += _write_shard(folder / file, shard)
        weight_map.update(dict.fromkeys((name for name, _, _ in shard), file))
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": total}, "weight_map": weight_map}, indent=2))
    return folder


def _write_shard(file: Path, shard: list[Tensor]) -> int:
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape, dtype in shard:
        start, end = end, end + size(shape, dtype)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        stream.truncate(8 + len(text) + end)  # a hole: no block of it is on disk
    return end
