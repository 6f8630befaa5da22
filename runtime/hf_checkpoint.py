"""Trained parameters back into the checkpoint they came from: the same files, names, shapes and dtypes.

The source's files are copied and only the bytes of trained tensors are written over, so headers, layout and everything
that was not trained (vision tower, MTP layers, frozen weights) stay bit for bit what they were.
"""

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import TensorHeader, read_headers
from dayzero.runtime.safetensors_reader import torch_dtype
from dayzero.runtime.weights import Rule, bind, whole

FLOATS = ("F64", "F32", "F16", "BF16")
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}
EMBEDDING, HEAD = "embed.weight", "head.weight"


def write_checkpoint(
    out: Path, source: Path, rules: Sequence[Rule], trained: Collection[str], value: Callable[[str], Tensor]
) -> set[str]:
    """Fills the folder `out` and returns the names of the checkpoint tensors that were trained.

    trained: parameters of the model that differ from the checkpoint. value(parameter): the whole of one, asked for once
    each; one at a time is in memory. Values are cast to the dtype of the source's tensor.

    Raises InputError for a parameter that no rule makes or whose shape does not fit, for a value that is not finite in
    the source's dtype, and for a quantised source tensor.
    """
    headers = read_headers(source)
    shapes = {name: header.shape for name, header in headers.items()}
    bound = bind(rules)
    for file in sorted({header.file for header in headers.values()}):
        shutil.copyfile(source / file, out / file)
    copy_companions(out, source)
    written: set[str] = set()
    for parameter in trained:
        if parameter not in bound:
            raise InputError(
                f"weights.py: {parameter}", found="a trained parameter, and no rule for it", expected="one rule"
            )
        tensor = value(parameter)
        if tuple(tensor.shape) != bound[parameter].shape(shapes):
            expected = f"{list(bound[parameter].shape(shapes))} from {source}"
            raise InputError(parameter, found=str(list(tensor.shape)), expected=expected)
        for name, region, part in bound[parameter].write(tensor, shapes):
            if region != whole(shapes[name]) or name in written:
                raise ValueError(f"the rule of {parameter} writes only a part of {name}, or writes it twice")
            _write(out, name, headers[name], part)
            written.add(name)
        if parameter == EMBEDDING and HEAD not in bound:
            read = {name for rule in bound.values() for name in rule.names()}
            for name in _copies(source, headers, bound[EMBEDDING].names()[0], headers.keys() - read):
                _write(out, name, headers[name], tensor)
                written.add(name)
    return written


def copy_companions(out: Path, source: Path) -> None:
    """Copies all that is not weights: configs, tokenizer, chat templates, code, licence, the index."""
    for path in sorted(source.iterdir()):
        index_of_others = path.name.endswith(".index.json") and path.name != "model.safetensors.index.json"
        if path.is_file() and path.suffix not in WEIGHTS and not path.name.startswith(".") and not index_of_others:
            shutil.copyfile(path, out / path.name)
    if (source / "additional_chat_templates").is_dir():
        shutil.copytree(source / "additional_chat_templates", out / "additional_chat_templates")


def _write(out: Path, name: str, header: TensorHeader, value: Tensor) -> None:
    if header.dtype not in FLOATS:
        raise InputError(
            f"{header.file}: {name}",
            found=f"a trained tensor that the checkpoint stores as {header.dtype}",
            expected=f"one of {', '.join(FLOATS)}",
            hint="Writing it back would need its scales. Train a dequantised checkpoint instead.",
        )
    data = value.detach().to("cpu", torch_dtype(header.dtype)).contiguous()
    if not torch.isfinite(data).all():
        bad, before = int((~torch.isfinite(data)).sum()), int(value.isnan().sum())
        raise InputError(
            name,
            found=f"{bad} values that are not finite as {header.dtype} ({before} NaN before the cast)",
            expected="finite weights",
            hint="The run diverged, or its weights outgrew the source's dtype. Export an earlier step.",
        )
    with (out / header.file).open("r+b") as stream:
        stream.seek(header.start)
        data.reshape(-1).view(torch.uint8).numpy().tofile(stream)


def _copies(source: Path, headers: Mapping[str, TensorHeader], embedding: str, unread: Collection[str]) -> list[str]:
    """Unread tensors that repeat a tied embedding: some checkpoints store the head although it is tied."""
    like = headers[embedding]
    twins = [name for name in sorted(unread) if (headers[name].dtype, headers[name].shape) == (like.dtype, like.shape)]
    return [name for name in twins if _same_bytes(source, headers[name], like)]


def _same_bytes(source: Path, one: TensorHeader, other: TensorHeader, chunk: int = 1 << 24) -> bool:
    with (source / one.file).open("rb") as first, (source / other.file).open("rb") as second:
        first.seek(one.start)
        second.seek(other.start)
        left = one.bytes
        while left > 0:
            size = min(chunk, left)
            if first.read(size) != second.read(size):
                return False
            left -= size
    return True
