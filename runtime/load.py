"""Weights into a sharded model, a parameter at a time: each rank reads only the bytes of its own shards."""

from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dayzero.runtime.content_hash import content_hash, hashed_dtype, hex_of
from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import TensorHeader, headers_sha256
from dayzero.runtime.nn import CausalLM
from dayzero.runtime.nn.causal_lm import initialise
from dayzero.runtime.precision import HeaderDtypes
from dayzero.runtime.safetensors_reader import SafetensorsReader
from dayzero.runtime.spec import CheckpointId
from dayzero.runtime.weights import BoundRule, Region, Rule, Shape, bind, check_coverage, whole


def check_same_checkpoint(folder: Path, headers: Mapping[str, TensorHeader], known: CheckpointId) -> None:
    """Raises InputError if `folder` is not the checkpoint that the package was made from, by its tensors' headers."""
    if headers_sha256(headers) != known.headers_sha256:
        total = sum(header.bytes for header in headers.values())
        raise InputError(
            str(folder),
            found=f"{len(headers)} tensors, {total} bytes",
            expected=f"the checkpoint of this package: {known.architecture}, {known.tensors} tensors, "
            f"{known.bytes} bytes, headers sha256 {known.headers_sha256[:12]}",
            hint="Pass the right folder with --checkpoint, or onboard this one.",
        )


def local_part(parameter: Tensor) -> tuple[Tensor, Region]:
    """This rank's part of a parameter and the region of the whole that it is. A plain tensor is all there."""
    if not isinstance(parameter, DTensor):
        return parameter.detach(), whole(tuple(parameter.shape))
    shape, offset = compute_local_shape_and_global_offset(parameter.shape, parameter.device_mesh, parameter.placements)
    region = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
    return parameter.to_local().detach(), region


def load_checkpoint(
    model: nn.Module,
    rules: Sequence[Rule],
    folder: Path,
    headers: Mapping[str, TensorHeader],
    elsewhere: Collection[str] = (),
    hashes: Mapping[str, str] | None = None,
) -> int:
    """Fills every parameter from the checkpoint and returns the bytes this rank read.

    The model has real (not meta) parameters, sharded or not, and beside them no more memory is used than for a chunk of
    one tensor. elsewhere: parameters that do not come from the checkpoint, such as adapters. Every value is compared
    after it is written. hashes: parameter -> the hash of what it was when it was proven (`check_content`), None to
    compare nothing; with a process group all its ranks call this together.

    Raises InputError for a parameter or buffer that no rule makes, a rule without a parameter, a shape that does not
    fit, a value that the parameter's dtype cannot hold, or content that is not what the hashes say.
    """
    bound = bind(rules)
    parameters = {name: p for name, p in _tensors(model).items() if name not in elsewhere}
    if missing := sorted(parameters.keys() - bound.keys()):
        raise InputError(
            f"weights.py: {missing[0]}",
            found=f"no rule makes it, nor {len(missing) - 1} others" if missing[1:] else "no rule makes it",
            expected="one rule for every parameter of model.py",
            hint="It would train from whatever memory held. Run onboard again.",
        )
    if extra := sorted(bound.keys() - parameters.keys()):
        raise InputError(
            f"weights.py: {extra[0]}",
            found="a rule for it, but no such parameter",
            expected="one rule for every parameter of model.py",
        )
    shapes = {name: header.shape for name, header in headers.items()}
    reader = SafetensorsReader(folder, {name: header.file for name, header in headers.items()})
    for name in parameters:
        _check_shape(bound[name], shapes, tuple(parameters[name].shape), folder)
    try:
        check_coverage(bound, shapes)
    except ValueError as error:
        raise InputError(str(folder), found=str(error), expected="every value of the checkpoint in one place") from None
    read = 0
    for name in sorted(parameters, key=lambda name: headers[bound[name].names()[0]].file):
        local, region = local_part(parameters[name])
        where = f"{folder}: {name}"
        try:
            read += bound[name].fill(local, reader, shapes, region, put=partial(write_exactly, where=where))
        except ValueError as error:
            raise InputError(where, found=str(error), expected="what weights.py says") from None
    if hashes is not None:
        known = HeaderDtypes(headers)
        dtypes = {name: hashed_dtype(bound[name].source.dtype(known, bound[name].index)) for name in parameters}
        check_content(parameters, bound, dtypes, hashes, folder)
    return read


def check_content(
    parameters: Mapping[str, Tensor],
    bound: Mapping[str, BoundRule],
    dtypes: Mapping[str, torch.dtype],
    hashes: Mapping[str, str],
    folder: Path,
) -> None:
    """Compares what the ranks hold together with the recorded hashes. dtypes: that each parameter is hashed in.

    Each rank hashes its own regions and the ranks add up; a region that several ranks hold counts as often, so that a
    replica which differs shows as well. Raises InputError, the same on every rank.
    """
    names = sorted(parameters)
    shares = torch.zeros(2, len(names), dtype=torch.int64)
    for number, name in enumerate(names):
        local, region = local_part(parameters[name])
        share = content_hash(local, tuple(parameters[name].shape), region, dtypes[name])
        shares[0, number] = share - 2**64 if share >= 2**63 else share
        shares[1, number] = local.numel()
    if dist.is_initialized():
        shares = shares.to(next((local_part(p)[0].device for p in parameters.values()), shares.device))
        dist.all_reduce(shares)
    wrong = []
    for name, total, held in zip(names, *shares.tolist(), strict=True):
        size = parameters[name].numel()
        copies = held // max(size, 1)
        found = hex_of(total) if held == copies * size else f"of {held} values instead of {size}"
        expected = hex_of(copies * int(hashes[name], 16))
        if found != expected:
            wrong.append((name, found, expected))
    if wrong:
        name, found, expected = wrong[0]
        sources = bound[name].names()
        made_of = ", ".join(sources[:3]) + (f" and {len(sources) - 3} more" if sources[3:] else "")
        also = f", and {len(wrong) - 1} other parameters" if wrong[1:] else ""
        raise InputError(
            f"{folder}: {name}{also}",
            found=f"content hash {found}, of {made_of}",
            expected=f"{expected}, by what was recorded when the package was made",
            hint="The checkpoint's bytes are not those that were proven. Restore the files, or onboard them again.",
        )


def load_random(model: nn.Module, fresh: CausalLM, std: float, seed: int) -> None:
    """Random weights, the same for any layout. fresh: the same model, unsharded and on the meta device; consumed."""
    parameters = _tensors(model)
    units: list[tuple[str, nn.Module]] = [("", fresh)]
    for path, stack in (("layers", fresh), ("encoder.layers", fresh.encoder)):
        if stack is not None:
            units += [(f"{path}.{i}.", layer) for i, layer in enumerate(stack.layers)]
            stack.layers = nn.ModuleList()
    for number, (prefix, unit) in enumerate(units):
        unit.to_empty(device="cpu")
        initialise(unit, std, seed * 100_003 + number)
        for name, value in _tensors(unit).items():
            local, region = local_part(parameters[prefix + name])
            with torch.no_grad():
                local.copy_(value[region])
        unit.to(device="meta")


def write_exactly(local: Tensor, value: Tensor, where: str) -> None:
    """Copies `value` and compares. Raises InputError if the copy changed it: lost precision, or a NaN."""
    with torch.no_grad():
        local.copy_(value)
    if not torch.equal(local.to(value.device, value.dtype), value):
        if value.isnan().any():
            raise InputError(where, found=f"{int(value.isnan().sum())} NaN values", expected="numbers")
        raise InputError(
            where,
            found=f"{value.dtype} values that {local.dtype} cannot hold",
            expected="a parameter dtype that keeps every value",
        )


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _check_shape(rule: BoundRule, shapes: Mapping[str, Shape], expected: Shape, folder: Path) -> None:
    try:
        found = rule.shape(shapes)
    except KeyError as error:
        raise InputError(
            f"{folder}: {error.args[0]}",
            found="no such tensor",
            expected=f"a source of {rule.parameter}",
            hint="Is this another revision of the checkpoint?",
        ) from None
    except ValueError as error:
        raise InputError(f"{folder}: {rule.parameter}", found=str(error), expected=f"{list(expected)}") from None
    if found != expected:
        raise InputError(
            f"{folder}: {rule.names()[0]}",
            found=f"{list(found)} for {rule.parameter}",
            expected=f"{list(expected)} from model.py",
        )
