"""A checkpoint to its specification and its settled ledger, with everything that must not stay open."""

import re
from collections.abc import Callable, Iterator
from typing import Any

import torch

from dayzero.onboard.by_rules.specify import specify_by_rules
from dayzero.onboard.checkpoint import Checkpoint
from dayzero.onboard.claims import Claim
from dayzero.onboard.config_fields import ConfigView
from dayzero.onboard.inspect.classify import Ledger, classify, settle
from dayzero.onboard.inspect.ledger import Finding, finding
from dayzero.onboard.inspect.unread_layouts import place_and_reason, unread_layouts
from dayzero.onboard.oracle import remote_code
from dayzero.onboard.oracle.reference import UnknownArchitecture, load_config, model_class
from dayzero.onboard.prove.interventions import Intervention
from dayzero.onboard.prove.proven import NotProven, Unproven
from dayzero.onboard.rules.unmapped import fates
from dayzero.onboard.specify import Specification, specify
from dayzero.runtime.packed import quantised_groups
from dayzero.runtime.spec import ModelSpec


def real_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Parameter shapes of the real model, without its memory."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in spec.build().state_dict().items()}


def specify_checkpoint(
    checkpoint: Checkpoint, name: str, decisions: dict[str, Any], tell: Callable[[str], None]
) -> tuple[Specification, Ledger]:
    """The specification and the settled ledger. Without a reference rules decide, and nothing is proven. Raises
    NotProven for anything that stays open, InputError where config and tensors disagree."""
    if layouts := unread_layouts(checkpoint.headers):
        raise NotProven([Unproven(*place_and_reason(layout, names)) for layout, names in layouts.items()])
    if checkpoint.quantization and not quantised_groups(checkpoint.headers):
        method = str(checkpoint.quantization.get("quant_method", "an unnamed method"))
        why = f"weights are quantised ({method}), and no decoder here reads them"
        raise NotProven([Unproven("config.json: quantization_config", why)])
    ignored = decisions.get("ignore_config") or {}
    if why := _no_reference(checkpoint):
        tell(f"{why}: rules decide, and nothing is verified")
        specification = specify_by_rules(checkpoint, classify(checkpoint), name, why, ignored)
    else:
        specification = specify(checkpoint.config, checkpoint.identity(), name, tell, checkpoint.headers)
    shapes, others = real_shapes(specification.spec), fates(specification.idle, specification.tables)
    ledger = settle(classify(checkpoint), checkpoint, specification.spec, shapes, specification.towers, others)
    unread = [field for field in specification.unread if field not in ignored]
    claims = [claim for claim in specification.claims if not {claim.field, claim.field.split(".")[0]} & ignored.keys()]
    harmless = [finding for claim in claims for finding in _harmless(claim)]
    copied = "its code is copied as it is, and trains what it computes"
    harmless += [
        finding("contradiction", f"{module}: {wrong}", copied) for module, wrong in specification.contradictions.items()
    ]
    ledger = ledger.model_copy(update={"unread_config": unread, "findings": [*ledger.findings, *harmless]})
    held = ConfigView(checkpoint.config)
    open_items = [
        Unproven(f"config.json: {field} = {held.get(field)!r}"[:160], "nobody reads it: not the reference, not us")
        for field in unread
    ]
    open_items += [_contradicted(claim) for claim in claims if claim.verdict == "contradicted"]
    open_items += [
        _unexplained(tried)
        for tried in specification.interventions
        if tried.effect == "unexplained" and not {tried.field, tried.field.split(".")[0]} & ignored.keys()
    ]
    open_items += _open_tensors(ledger.unaccounted)
    if open_items:
        raise NotProven(open_items)
    return specification, ledger


def _contradicted(claim: Claim) -> Unproven:
    """What a config says of the model that the proof contradicts, and what to do about it."""
    why = (
        f"stated, and not true of the proven model ({claim.proven}). Either the config is wrong, and ignore_config in "
        f"decisions.yaml may accept {claim.field} with a reason, or the reference is not the checkpoint's"
    )
    return Unproven(f"config.json: {claim.field} = {claim.states}"[:160], why)


def _unexplained(tried: Intervention) -> Unproven:
    """A field that the reference computes with in a way that nothing proven follows, and what to do about it."""
    why = (
        f"the reference reads it, and what it does at {tried.altered!r} is no proven block ({tried.detail}). Only the "
        f"present value is proven: ignore_config in decisions.yaml may accept {tried.field} with a reason"
    )
    return Unproven(f"config.json: {tried.field} = {tried.value!r}"[:160], why)


def _harmless(claim: Claim) -> Iterator[Finding]:
    """What a config says wrongly and nothing depends on: to be known, for another reader may depend on it."""
    of = {"not the tensors'": "of the tensors", "without effect": "of the model; the reference gives it no effect"}
    if claim.verdict in of:
        what = f"{claim.field}={claim.states} is stated, and not true {of[claim.verdict]}"
        yield finding("contradiction", what, claim.proven)


def _no_reference(checkpoint: Checkpoint) -> str:
    """Why nothing could be the reference, "" where there is one. Raises NotProven where only code that came with the
    checkpoint could be it, and may not be run."""
    code = remote_code.remote_code(checkpoint.path, checkpoint.config)
    if remote_code.current() is not None:
        return ""
    try:
        model_class(load_config(checkpoint.config), list(checkpoint.config.get("architectures") or []))
    except UnknownArchitecture as error:
        if code is None:
            return str(error)
        files = ", ".join(remote_code.files_to_run(checkpoint.path, code))
        why = f"{error}; --trust-remote-code would run the checkpoint's own code in a sandbox: {files}"
        todo = "without auto_map in config.json, rules decide, and nothing of the package is verified"
        raise NotProven([Unproven("config.json: auto_map", why, todo=todo)]) from None
    return ""


def _open_tensors(names: list[str]) -> list[Unproven]:
    """Tensors without a fate, one line each where they are few, else one a pattern."""
    why = "no parameter of the proven model is made of it"
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    found: list[Unproven] = []
    for pattern, members in alike.items():
        if len(members) <= 3:
            found += [Unproven(name, why) for name in members]
        else:
            found.append(Unproven(pattern, f"{why}: {len(members)} tensors, {members[0]} first"))
    return found
