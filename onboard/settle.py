"""The fates that proven rules give the tensors of a checkpoint, and where its config and its tensors disagree."""

import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from dayzero.onboard.checkpoint import Checkpoint
from dayzero.onboard.config_fields import SIZES, field_of, size_of
from dayzero.onboard.folded import fold_checkpoint
from dayzero.onboard.ledger import CARRIED, Fate, Ledger
from dayzero.runtime.errors import InputError

if TYPE_CHECKING:  # the blocks need torch, which takes longer to import than a trillion parameters take to read
    from dayzero.runtime.spec import ModelSpec


def settle(ledger: Ledger, checkpoint: Checkpoint, spec: "ModelSpec", shapes: Mapping[str, tuple[int, ...]]) -> Ledger:
    """The ledger with the fate that the proven rules give every tensor.

    shapes: of the real model's parameters. Raises InputError where a rule needs a tensor that the checkpoint does not
    have, or one of another shape: the config and the files disagree.
    """
    from dayzero.runtime.weights import bind, check_coverage

    bound = bind([rule.build() for rule in spec.rules])
    stored = {name: header.shape for name, header in checkpoint.headers.items()}
    target: dict[str, str] = {}
    for parameter, rule in bound.items():
        names = rule.names()
        for name in names:
            if name not in stored:
                raise InputError(
                    name,
                    found="not in the checkpoint",
                    expected=f"a tensor, from {_sizes(checkpoint.config)} in config.json",
                    hint=f"{sum(n in stored for n in names)} of the {len(names)} tensors of {parameter} are there. "
                    "Is a shard missing from the index, or is config.json of another revision?",
                )
            target[name] = parameter
        _check_shape(parameter, rule, stored, shapes, checkpoint)
    try:
        check_coverage(bound, stored)
    except ValueError as error:
        raise InputError("weights", found=str(error), expected="every part of a tensor used exactly once") from None
    if missing := sorted(shapes.keys() - bound.keys()):
        raise InputError("weights", found=f"no rule makes {missing[0]}", expected="a source for every parameter")
    open_names: list[str] = []
    groups = []
    for folded, group in zip(fold_checkpoint(checkpoint.headers).groups, ledger.groups, strict=True):
        fates = {name: _fate(name, group.part, target) for name in folded.names}
        open_names += [name for name, (fate, _, _) in fates.items() if fate == "open"]
        fate, parameter, reason = fates[folded.names[0]]
        if any(other[0] != fate for other in fates.values()):
            fate, parameter, reason = "open", None, "some of these tensors are used and some are not"
        template = re.sub(r"^layers\.\d+\.", "layers.{layer}.", parameter) if parameter else None
        groups.append(group.model_copy(update={"fate": fate, "parameter": template, "reason": reason}))
    return ledger.model_copy(update={"groups": groups, "unaccounted": sorted(open_names)})


def _fate(name: str, part: str, target: Mapping[str, str]) -> tuple[Fate, str | None, str]:
    if name in target:
        return "mapped", target[name], ""
    if name.endswith("rotary_emb.inv_freq"):
        return "ignored", None, "computed from the config; the rotary proof covers it"
    if part in CARRIED:
        return "carried", None, CARRIED[part]
    return "open", None, "no parameter of the proven model is made of it"


def _sizes(config: Mapping[str, Any]) -> str:
    names = [name for meaning in ("layers", "experts") for name in SIZES[meaning] if config.get(name) is not None]
    return ", ".join(f"{name}={config[name]}" for name in names)


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
    fields = ", ".join(f"{field}={value}" for field, value in _behind(wrong, checkpoint.config).items())
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
