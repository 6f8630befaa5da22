"""L0: every tensor of the checkpoint has a fate, and going in and out through the rules changes no bit of it."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from dayzero.onboard.align.ladder import THRESHOLDS, Rung, judge
from dayzero.onboard.align.tables import table_errors
from dayzero.onboard.checkpoint import Checkpoint
from dayzero.onboard.inspect.classify import Ledger
from dayzero.runtime.content_hash import content_hash, hashed_dtype, hex_of
from dayzero.runtime.safetensors_reader import SafetensorsReader, torch_dtype
from dayzero.runtime.spec import ModelSpec, RuleSpec
from dayzero.runtime.weights import bind, whole


def coverage_rung(
    checkpoint: Checkpoint,
    ledger: Ledger,
    spec: ModelSpec,
    tell: Callable[[int, int], None] = lambda done, total: None,
    tables: Sequence[RuleSpec] = (),
) -> tuple[Rung, dict[str, str]]:
    """The rung, and the content hash of every parameter, by which training knows these weights again.

    Reads each parameter from the files as training would, in float32 or its own wider dtype, writes it back under
    the source's names, shapes and dtypes, and compares the bits. tell(done, total): tensors compared so far.
    tables: rules for what the reference computes and the files hold too; they must hold what it computes."""
    errors: dict[str, float] = {f"{name} has no fate": float("inf") for name in ledger.unaccounted}
    shapes = {name: header.shape for name, header in checkpoint.headers.items()}
    files = {name: header.file for name, header in checkpoint.headers.items()}
    reader, again = SafetensorsReader(checkpoint.path, files), SafetensorsReader(checkpoint.path, files)
    bound = bind([rule.build() for rule in spec.rules])
    total = sum(len(rule.names()) for rule in bound.values())
    seen: set[str] = set()
    different = 0
    hashes: dict[str, str] = {}
    for parameter, rule in bound.items():
        value = rule.read(reader, shapes)
        shape = tuple(value.shape)
        hashes[parameter] = hex_of(content_hash(value, shape, whole(shape), hashed_dtype(value.dtype)))
        if value.is_floating_point():  # whole numbers stay what they are, here and in training
            value = value.to(torch.promote_types(value.dtype, torch.float32))
        for name, region, part in rule.write(value, shapes, source=again):
            seen.add(name)
            exported = part.to(torch_dtype(checkpoint.headers[name].dtype))
            stored = again.read(name, region)
            if not _same_bits(exported, stored):
                errors[f"{name} {_why(stored)}"] = float("inf")
                different += 1
        tell(len(seen), total)
    mapped = {name for group in ledger.groups if group.fate == "mapped" for name in [group.pattern]}
    errors[f"{len(seen)} tensors in {len(mapped)} patterns, in and out"] = float(different)
    if tables:
        errors |= table_errors(checkpoint.config, tables, bound, reader, shapes)
    return judge(errors, THRESHOLDS["L0"]), hashes


def _why(stored: Tensor) -> str:
    """What is wrong with a tensor whose bits changed: no arithmetic keeps those of a NaN."""
    holds_nan = stored.is_floating_point() and bool(stored.float().isnan().any())
    return "holds NaN: is this file whole?" if holds_nan else "comes back changed"


def _same_bits(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(bits), b.contiguous().view(bits))
