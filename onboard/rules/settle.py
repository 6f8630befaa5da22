"""The fates that proven rules give the tensors of a checkpoint, and where its config and its tensors disagree."""

import math
import re
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from dayzero.onboard.checkpoint import Checkpoint
from dayzero.onboard.config_fields import SIZES, ConfigView, field_of, size_of
from dayzero.onboard.inspect.folded import fold_checkpoint
from dayzero.onboard.inspect.ledger import CARRIED, Fate, Ledger, TensorGroup, extent
from dayzero.onboard.inspect.tensor_names import Group, pattern_of, subset
from dayzero.runtime.errors import InputError

if TYPE_CHECKING:  # the blocks need torch, which takes longer to import than a trillion parameters take to read
    from dayzero.runtime.spec import ModelSpec


def numberless(name: str) -> str:
    """The name with `{n}` for every part of it that is a number."""
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "{n}", name)


def settle(
    ledger: Ledger,
    checkpoint: Checkpoint,
    spec: "ModelSpec",
    shapes: Mapping[str, tuple[int, ...]],
    towers: Collection[str] = (),
    others: Mapping[str, tuple[Fate, str]] | None = None,
) -> Ledger:
    """The ledger with the fate that the proven rules give every tensor.

    shapes: of the real model's parameters. towers: patterns (`numberless`) of tensors that the reference was seen to
    have no use for when it reads text; they are carried. others: fates, with reasons, of tensors that no parameter is
    made of (`unmapped.fates`). Raises InputError where a rule needs a tensor that the
    checkpoint does not have, or one of another shape, or where tensors that the reference keeps one of are two: the
    config and the files disagree.
    """
    from dayzero.runtime.weights import bind, check_coverage

    bound = bind([rule.build() for rule in spec.rules])
    stored = {name: header.shape for name, header in checkpoint.headers.items()}
    target: dict[str, str] = {}
    copy_of: dict[str, str] = {}
    for parameter, rule in bound.items():
        for name in rule.names():
            if name not in stored:
                raise _missing(name, parameter, bound, stored, shapes, checkpoint)
            target[name] = parameter
        _check_shape(parameter, rule, stored, shapes, checkpoint)
        copies = dict(_copies(rule, stored))
        if copies:
            _check_copies(rule, copies, stored, checkpoint)
            copy_of |= copies
    try:
        check_coverage(bound, stored)
    except ValueError as error:
        raise InputError("weights", found=str(error), expected="every part of a tensor used exactly once") from None
    if missing := sorted(shapes.keys() - bound.keys()):
        raise InputError("weights", found=f"no rule makes {missing[0]}", expected="a source for every parameter")
    used, excerpts = _used(bound, stored)
    open_names: list[str] = []
    groups = []
    others = others or {}
    fate_of = partial(_fate, target=target, towers=towers, others=others)
    for folded, group in _parted(checkpoint, ledger, others.keys() - target.keys()):
        fates = {name: fate_of(name, group.part) for name in folded.names}
        open_names += [name for name, (fate, _, _) in fates.items() if fate == "open"]
        fate, parameter, reason = fates[folded.names[0]]
        if any(other[0] != fate for other in fates.values()):
            fate, parameter, reason = "open", None, "some of these tensors are used and some are not"
        template = re.sub(r"^layers\.\d+\.", "layers.{layer}.", parameter) if parameter else None
        repeated = {pattern_of(copy_of[name])[0] if name in copy_of else None for name in folded.names}
        update = {"fate": fate, "parameter": template, "reason": reason, "copy_of": repeated.pop()}
        each = math.prod(group.logical_shape or group.shape)
        update["unused"] = sum(each - used[name] for name in folded.names if name in used)
        if excerpts & set(folded.names):
            update["reason"] = "in part; the reference does not use the rest when it reads text, it is carried"
        if repeated:
            update |= {"fate": "open", "reason": "some of these tensors repeat others and some do not", "copy_of": None}
            open_names += folded.names
        groups.append(group.model_copy(update=update))
    return ledger.model_copy(update={"groups": groups, "unaccounted": sorted(open_names)})


def _parted(checkpoint: Checkpoint, ledger: Ledger, apart: Collection[str]) -> Iterator[tuple[Group, TensorGroup]]:
    """The groups, those that are partly of the tensors `apart` in two: the experts that compute, and the rest."""
    for folded, group in zip(fold_checkpoint(checkpoint.headers).groups, ledger.groups, strict=True):
        sides: dict[bool, list[int]] = {False: [], True: []}
        for row, name in enumerate(folded.names):
            sides[name in apart].append(row)
        if not all(sides.values()):
            yield folded, group
            continue
        for rows in sides.values():
            part = subset(folded, rows, checkpoint.headers)
            yield part, group.model_copy(update=extent(part))


def _fate(
    name: str,
    part: str,
    target: Mapping[str, str],
    towers: Collection[str],
    others: Mapping[str, tuple[Fate, str]],
) -> tuple[Fate, str | None, str]:
    if name in target:
        return "mapped", target[name], ""
    if name in others:
        return others[name][0], None, others[name][1]
    if name.endswith("rotary_emb.inv_freq"):
        return "ignored", None, "computed from the config; the rotary proof covers it"
    if part in CARRIED:
        return "carried", None, CARRIED[part]
    if numberless(name) in towers:
        return "carried", None, "the reference does not use it when it reads text"
    return "open", None, "no parameter of the proven model is made of it"


def _missing(
    name: str,
    parameter: str,
    bound: Mapping[str, Any],
    stored: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
) -> InputError:
    """For a tensor that a rule needs and that is not there. A parameter of which nothing is there and that is as large
    as just one other may be meant to share it."""
    names = bound[parameter].names()
    there = sum(other in stored for other in names)
    alike = [p for p, shape in shapes.items() if shape == shapes[parameter] and p != parameter and p in bound]
    twin = bound[alike[0]].names() if len(alike) == 1 else []
    if not there and twin and all(other in stored for other in twin):
        field, said = _tying(checkpoint.config)
        return InputError(
            name,
            found="not in the checkpoint",
            expected=f"a tensor {list(shapes[parameter])} for {parameter}: the reference ties it to nothing ({said})",
            hint=f"The reference would begin with random values. If it is to repeat {twin[0]}, set {field} to true in "
            "config.json; if not, a shard is missing.",
        )
    return InputError(
        name,
        found="not in the checkpoint",
        expected=f"a tensor, from {_sizes(checkpoint.config)} in config.json",
        hint=f"{there} of the {len(names)} tensors of {parameter} are there. "
        "Is a shard missing from the index, or is config.json of another revision?",
    )


def _tying(config: Mapping[str, Any]) -> tuple[str, str]:
    """(the config's field that says whether matrices are shared, what it says)."""
    parts = [("", config), *((f"{name}.", part) for name, part in config.items() if isinstance(part, Mapping))]
    for prefix, part in parts:
        for name, value in part.items():
            if name.startswith("tie_") and isinstance(value, bool):
                return prefix + name, f"{prefix}{name}={value} in config.json"
    return "tie_word_embeddings", "config.json has no tie_word_embeddings; the architecture's own default holds"


def _used(bound: Mapping[str, Any], stored: Mapping[str, tuple[int, ...]]) -> tuple[dict[str, int], set[str]]:
    """Of tensors that parts are taken of: how many of their values parameters are made of, and the names of those of
    which the rest is carried."""
    import torch

    from dayzero.runtime.weights.node import EXCERPT

    used: dict[str, int] = {}
    excerpts: set[str] = set()
    for rule in bound.values():
        partly = {next(leaf.names(inner)): part for leaf, inner, part in rule.source.leaves(rule.index) if part}
        excerpts |= {name for name, part in partly.items() if part == EXCERPT}
        for piece in rule.pieces(torch.empty(rule.shape(stored), device="meta"), stored) if partly else ():
            name = next(piece.leaf.names(piece.index))
            if name in partly:
                used[name] = used.get(name, 0) + (piece.view.numel() if piece.role != "padding" else 0)
    return used, excerpts


def _copies(rule: Any, stored: Mapping[str, tuple[int, ...]]) -> Iterator[tuple[str, str]]:
    """(tensor that repeats another, that other one), for a rule that says so."""
    import torch

    if not _shares(rule.source):
        return
    first = ""
    for piece in rule.pieces(torch.empty(rule.shape(stored), device="meta"), stored):
        name = next(piece.leaf.names(piece.index))
        if piece.role == "copy":
            yield name, first
        else:
            first = name


def _shares(source: Any) -> bool:
    from dayzero.runtime.weights import Tie

    return isinstance(source, Tie) or any(_shares(child) for child in source.children)


def _check_copies(
    rule: Any, copies: Mapping[str, str], stored: Mapping[str, tuple[int, ...]], checkpoint: Checkpoint
) -> None:
    """Reads them, some rows at a time. Raises InputError where they differ."""
    from dayzero.runtime.safetensors_reader import SafetensorsReader

    reader = SafetensorsReader(checkpoint.path, {name: header.file for name, header in checkpoint.headers.items()})
    everything = tuple(slice(0, size) for size in rule.shape(stored))
    rows = everything[0].stop if everything else 1
    step = max(1, _READ * rows // max(1, math.prod(part.stop for part in everything)))
    for start in range(0, rows, step):
        region = (slice(start, min(start + step, rows)), *everything[1:]) if everything else ()
        try:
            rule.read(reader, stored, region)
        except ValueError as error:
            copy, other = next(iter(copies.items()))
            field, said = _tying(checkpoint.config)
            raise InputError(
                f"{other} and {copy}",
                found=f"two tensors of different values: {error}",
                expected=f"the same values: the reference keeps one tensor for both ({said})",
                hint=f"Either would be lost. If both are meant, set {field} to false in config.json; if only the first "
                "is, remove the second from the checkpoint.",
            ) from None


_READ = 1 << 24  # values at a time


def _sizes(config: Mapping[str, Any]) -> str:
    view = ConfigView(config)
    named = [view.said(meaning) for meaning in ("layers", "experts") if view.size(meaning) is not None]
    return ", ".join(named) or "its sizes"


def _check_shape(
    parameter: str,
    rule: Any,
    stored: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
) -> None:
    try:
        found = rule.shape(stored)
    except ValueError as error:
        raise InputError(parameter, found=str(error), expected="tensors that fit together") from None
    expected = shapes[parameter]
    if found == expected:
        return
    name = rule.names()[0]
    wrong = [size for size, other in zip(expected, found, strict=False) if size != other] or list(expected)
    text = ConfigView(checkpoint.config).text
    fields = ", ".join(f"{field}={value}" for field, value in _behind(wrong, text).items())
    raise InputError(
        name,
        found=f"{list(stored[name])} in {checkpoint.headers[name].file}",
        expected=f"{list(expected)} for {parameter}, from {fields or 'its sizes'} in config.json",
        hint="The config and the tensors disagree. Is one of them of another revision? "
        f"Look with: onboard inspect {checkpoint.path.name}",
    )


def _behind(sizes: list[int], config: Mapping[str, Any]) -> dict[str, int]:
    """Config fields that are one of these sizes, or half of one, or whose heads times the head size are one."""
    held = {field: size for names in SIZES.values() for field in names if type(size := config.get(field)) is int}
    found = {field: value for field, value in held.items() if value > 1 and {value, 2 * value} & set(sizes)}
    head_dim = size_of(config, "head_dim")
    for heads in (field_of(config, "heads"), field_of(config, "kv_heads")):
        if head_dim and heads in held and held[heads] * head_dim in sizes:
            found |= {heads: held[heads], str(field_of(config, "head_dim")): head_dim}
    return found
