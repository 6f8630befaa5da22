"""Trained parameters back into the checkpoint they came from: the same files, names, shapes and dtypes.

The source's files are copied and only the bytes of trained tensors are written over, so headers, layout and everything
that was not trained (vision tower, MTP layers, frozen weights) stay bit for bit what they were.
"""

import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import TensorHeader, read_headers
from dayzero.runtime.quantisation import RoundTrip
from dayzero.runtime.safetensors_reader import SafetensorsReader, torch_dtype
from dayzero.runtime.weights import BoundRule, Decoded, Region, Rule, bind, check_coverage, whole

FLOATS = ("F64", "F32", "F16", "BF16")
WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx"}
EMBEDDING, HEAD = "embed.weight", "head.weight"


def write_checkpoint(
    out: Path,
    source: Path,
    rules: Sequence[Rule],
    trained: Collection[str],
    value: Callable[[str], Tensor],
    requantise: Callable[[str, RoundTrip], None] | None = None,
) -> set[str]:
    """Fills the folder `out` and returns the names of the checkpoint tensors that were trained.

    trained: parameters of the model that differ from the checkpoint. value(parameter): the whole of one, asked for once
    each; one at a time is in memory. Values are cast to the dtype of the source's tensor. requantise(name, cost): that
    quantised tensors may be written in their own format, and what that cost each; blocks that did not change keep their
    bytes.

    Raises InputError for a parameter that no rule makes or whose shape does not fit, for a value that is not finite in
    the source's dtype, and for a quantised source tensor without `requantise`, or in a format that is only read.
    """
    headers = read_headers(source)
    shapes = {name: header.shape for name, header in headers.items()}
    bound = bind(rules)
    check_coverage(bound, shapes)
    for file in sorted({header.file for header in headers.values()}):
        shutil.copyfile(source / file, out / file)
    copy_companions(out, source)
    files = {name: header.file for name, header in headers.items()}
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
        parts = bound[parameter].write(
            tensor,
            shapes,
            # The new files hold what other parameters have already written to a tensor that is shared with them.
            source=SafetensorsReader(out, files) if requantise is not None else None,
            tell=requantise or (lambda name, cost: None),
        )
        coded = {name for leaf, index in _quantised(bound[parameter]) for name in leaf.names(index)}
        with _told_as_input(parameter, bound[parameter], headers):
            for name, region, part in parts:
                _write(out, name, headers[name], region, part, quantised=name in coded)
                written.add(name)
        if parameter == EMBEDDING and HEAD not in bound:
            read = {name for rule in bound.values() for name in rule.names()}
            for name in _copies(source, headers, bound[EMBEDDING].names()[0], headers.keys() - read):
                _write(out, name, headers[name], whole(shapes[name]), tensor)
                written.add(name)
    return written


def _quantised(rule: BoundRule) -> Iterator[tuple[Decoded, Mapping[str, int]]]:
    return ((leaf, index) for leaf, index, _ in rule.source.leaves(rule.index) if isinstance(leaf, Decoded))


@contextmanager
def _told_as_input(parameter: str, rule: BoundRule, headers: Mapping[str, TensorHeader]) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        name = rule.names()[0]
        raise InputError(
            f"{headers[name].file}: {name}",
            found=f"a trained tensor that the checkpoint stores as {headers[name].dtype}: {error}",
            expected=f"one of {', '.join(FLOATS)}, or a quantised format that can be written",
            hint="Round it to that format again with: runtime export --requantise",
        ) from None


def copy_companions(out: Path, source: Path) -> None:
    """Copies all that is not weights: configs, tokenizer, chat templates, code, licence, the index."""
    for path in sorted(source.iterdir()):
        index_of_others = path.name.endswith(".index.json") and path.name != "model.safetensors.index.json"
        if path.is_file() and path.suffix not in WEIGHTS and not path.name.startswith(".") and not index_of_others:
            shutil.copyfile(path, out / path.name)
    if (source / "additional_chat_templates").is_dir():
        shutil.copytree(source / "additional_chat_templates", out / "additional_chat_templates")


def _write(out: Path, name: str, header: TensorHeader, region: Region, value: Tensor, quantised: bool = False) -> None:
    """Writes a region of a tensor into its file. quantised: the value may be codes or scales."""
    if header.dtype not in FLOATS and not quantised:
        raise InputError(
            f"{header.file}: {name}",
            found=f"a trained tensor that the checkpoint stores as {header.dtype}",
            expected=f"one of {', '.join(FLOATS)}",
            hint="Writing it back would need its scales. Train a dequantised checkpoint instead.",
        )
    data = value.detach().to("cpu", torch_dtype(header.dtype)).contiguous()
    if header.dtype in FLOATS and not torch.isfinite(data).all():
        bad, before = int((~torch.isfinite(data)).sum()), int(value.isnan().sum())
        raise InputError(
            name,
            found=f"{bad} values that are not finite as {header.dtype} ({before} NaN before the cast)",
            expected="finite weights",
            hint="The run diverged, or its weights outgrew the source's dtype. Export an earlier step.",
        )
    if not data.numel():
        return
    # As bytes: numpy has not all of these dtypes. The last dimension is as many times longer as an element has bytes.
    place = np.memmap(out / header.file, np.uint8, "r+", header.start, (*header.shape, data.element_size()))
    place[region] = data.unsqueeze(-1).view(torch.uint8).numpy()
    place.flush()


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
