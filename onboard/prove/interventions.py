"""Changes config fields one at a time and proves again: what a value of 1, None or False hides cannot hide twice.

A field that changes the reference's logits must change our model in step, with the same evidence resolved on the new
config, or select another block that is proven in turn. What does neither is reported: the present value is proven, the
field's meaning is not.
"""

import itertools
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from pydantic import Field

from dayzero.onboard.candidates import Candidate, Evidence
from dayzero.onboard.composition import load_reference, specification_of
from dayzero.onboard.config_fields import IRRELEVANT, SIZES
from dayzero.onboard.oracle.reference import UnknownArchitecture, build, redraw, run, text_config
from dayzero.onboard.prove.block import TOLERANCE, relative_error
from dayzero.onboard.prove.model import prove_model
from dayzero.onboard.prove.proven import NotProven, Proven, ProvenPart
from dayzero.runtime.errors import InputError
from dayzero.runtime.spec import CheckpointId, Record

Effect = Literal["none", "follows", "other block", "unexplained", "refused"]
_SETTLED: set[Effect] = {"none", "follows", "other block"}

_VARIED_SIZES = {
    "experts",
    "top_k",
    "window",
}  # sizes that are also arithmetic; the others shrinking has changed already
_FIXED = {name for meaning, names in SIZES.items() if meaning not in _VARIED_SIZES for name in names}


class Intervention(Record):
    """field was value, became altered. effect: none on the logits, nor on ours; our model follows with the same
    evidence; other blocks are selected and proven; unexplained; or the reference refuses the value. reads: fields newly
    read."""

    field: str
    value: Any
    altered: Any
    effect: Effect
    detail: str = ""
    reads: list[str] = Field(default_factory=list)


def alternatives(name: str, value: Any) -> list[Any]:
    """Other values worth trying for a field that holds `value`; of an integer the second if the first says nothing."""
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, int):
        return [value + 1, 2 * value] if value > 1 else [value + 1]
    if isinstance(value, float):
        return [value * 1.7 if value else 0.3]
    if value is None:
        return [3e-5] if "eps" in name else [0.5, 5]
    if isinstance(value, str) and value.startswith(("silu", "swish", "gelu", "relu")):
        return ["gelu" if value.startswith("s") else "silu"]
    return []


def varied_fields(fields: Mapping[str, Any], reads: set[str]) -> Iterator[tuple[str, Any, Any, dict[str, Any]]]:
    """(field, value, other value, all fields with it) for the fields that the reference reads and whose meaning is not
    known already.

    Settings that stand in a field, such as those of rotary positions, are varied one by one, and named with dots:
    `rope_parameters.rope_theta`, or `rope_parameters.full_attention.rope_theta` where each kind of layer has its own.
    """
    for name, value in sorted(fields.items()):
        if name in reads:
            yield from _variants(fields, (), name, value)


def _variants(
    held: Mapping[str, Any], above: tuple[str, ...], name: str, value: Any
) -> Iterator[tuple[str, Any, Any, dict[str, Any]]]:
    """The same of the field `name` of `held`, settings that stand in the fields `above`."""
    if isinstance(value, Mapping):
        for inner, setting in sorted(value.items()):
            for path, before, other, settings in _variants(value, (*above, name), inner, setting):
                yield path, before, other, {**held, name: settings}
    elif name not in _FIXED and name not in IRRELEVANT and not (above and value is None):
        for other in alternatives(name, value):
            yield ".".join((*above, name)), value, other, {**held, name: other}


def intervene(
    small: Mapping[str, Any],
    section: str,
    reads: set[str],
    dormant: set[str],
    proven: Proven,
    ids: torch.Tensor,
    identity: CheckpointId,
    tell: Callable[[str], None] = lambda line: None,
) -> list[Intervention]:
    """Varies every field that the reference reads, and the dormant ones, which it knows but does not read at these
    values, on the shrunk config `small`. section: the nested config that describes the text decoder, "" for none."""
    base = _logits(small, ids)
    done: list[Intervention] = []
    fields = small[section] if section else small
    for name, variants in itertools.groupby(varied_fields(fields, reads | dormant), key=lambda varied: varied[0]):
        tried: list[_Varied] = []
        for _, value, other, altered in variants:
            tell(f"varying {name}")
            tried.append(_Varied(value, other, {**small, section: altered} if section else altered))
            tried[-1].compare(base, proven, ids, identity)
            if isinstance(value, int) and tried[-1].effect in _SETTLED:
                break
        for varied in tried if not _settled(tried) else [varied for varied in tried if varied.value is None]:
            varied.search(proven, ids, identity)
            if isinstance(varied.value, int) and varied.effect in _SETTLED:
                break
        done += [varied.as_intervention(name, reads) for varied in _telling(tried)]
    return done


def _settled(tried: list["_Varied"]) -> bool:
    return any(varied.effect in _SETTLED for varied in tried)


def _telling(tried: list["_Varied"]) -> list["_Varied"]:
    """Those that say what the field means: of an integer one that is settled, since what another value said was no
    meaning of the field (experts that do not fall into groups, for one); refused ones only where all are."""
    settled = [varied for varied in tried if isinstance(varied.value, int) and varied.effect in _SETTLED]
    return settled[:1] or [varied for varied in tried if varied.effect != "refused"] or tried


@dataclass
class _Varied:
    """A field that was `value` and becomes `altered` in `config`, and what is known of the effect; None for not yet."""

    value: Any
    altered: Any
    config: Mapping[str, Any]
    effect: Effect | None = None
    detail: str = ""
    reads: set[str] = field(default_factory=set)
    logits: torch.Tensor = field(default_factory=lambda: torch.empty(0))

    def as_intervention(self, name: str, reads: set[str]) -> Intervention:
        assert self.effect is not None
        return Intervention(
            field=name, value=self.value, altered=self.altered, effect=self.effect, detail=self.detail,
            reads=sorted(self.reads - reads),
        )  # fmt: skip

    def compare(self, base: torch.Tensor, proven: Proven, ids: torch.Tensor, identity: CheckpointId) -> None:
        """What takes no search: whether the reference refuses the value, whether logits change, whether ours follow."""
        try:
            model, reads = self._reference()
            with torch.no_grad():
                self.logits = run(model, ids)
        except (
            InputError,
            UnknownArchitecture,
            RuntimeError,
            TypeError,
            ValueError,
            AttributeError,
            KeyError,
        ) as error:
            self.effect, self.detail = "refused", str(error).strip().splitlines()[-1].strip()[:120]
            return
        self.reads = reads & self.config.keys()  # it has grown while the model ran
        if _same_logits(model, proven, ids, self.logits, identity):
            changed = self.logits.shape != base.shape or not torch.equal(self.logits, base)
            self.effect = "follows" if changed else "none"

    def search(self, proven: Proven, ids: torch.Tensor, identity: CheckpointId) -> None:
        """Whether other blocks are proven for the altered reference, where nothing else is known of it."""
        if self.effect is not None:
            return
        model, _ = self._reference()
        try:
            again, _ = prove_model(model, ids, torch.Generator().manual_seed(2), usual=proven.claims)
        except NotProven as error:
            self.effect, self.detail = "unexplained", str(error)[:300]
            return
        if _same_logits(model, again, ids, self.logits, identity):
            self.effect, self.detail = "other block", _difference(proven, again, model)
        else:
            self.effect = "unexplained"
            self.detail = "the blocks are proven one by one, but not their composition"

    def _reference(self) -> tuple[torch.nn.Module, set[str]]:
        model, reads = build(self.config, record=True)
        redraw(model, torch.Generator().manual_seed(1))
        return model, reads


def _logits(config: Mapping[str, Any], ids: torch.Tensor) -> torch.Tensor:
    model, _ = build(config)
    redraw(model, torch.Generator().manual_seed(1))
    with torch.no_grad():
        return run(model, ids)


def _same_logits(
    model: torch.nn.Module, proven: Proven, ids: torch.Tensor, logits: torch.Tensor, identity: CheckpointId
) -> bool:
    """Whether our model, its arguments resolved on the altered reference, gives the altered logits."""
    try:
        spec = specification_of(model, text_config(model), proven, list(range(len(proven.layers))), identity, "altered")
        ours = spec.build().to(torch.float64)
        load_reference(ours, model, proven)
        bounds = torch.arange(0, ids.numel() + 1, ids.shape[1])
        with torch.no_grad():
            got = ours(ids.flatten(), bounds).reshape(logits.shape)
    except (NotProven, RuntimeError, ValueError, AttributeError, KeyError, IndexError):
        return False
    return relative_error(got, logits) <= TOLERANCE


def _difference(before: Proven, after: Proven, model: torch.nn.Module) -> str:
    """Which claims changed, one line a part."""
    changes = []
    for old_layer, new_layer in zip(before.layers, after.layers, strict=False):
        old_parts = {part.unit.name: part for part in old_layer.parts}
        for part in new_layer.parts:
            if part.unit.name not in old_parts:
                changes.append(f"{part.unit.name}: {part.attempt.candidate.block} joins")
                continue
            changes += _changed(part.unit.name, old_parts[part.unit.name], part)
        changes += [f"{name} goes" for name in old_parts.keys() - {part.unit.name for part in new_layer.parts}]
        changes += _rewired("the layer", old_layer.gives, new_layer.gives)
    changes += _rewired("embedding", {"rows": before.embed_scale}, {"rows": after.embed_scale})
    changes += _rewired("logits", _logit_factors(before), _logit_factors(after))
    return textwrap.shorten("; ".join(dict.fromkeys(changes)), 300, placeholder=" ...")


def _logit_factors(proven: Proven) -> dict[str, Evidence]:
    held = {"scale": proven.logit_scale, "softcap": proven.logit_softcap, "rows": proven.logit_rows}
    return {name: evidence for name, evidence in held.items() if evidence is not None}


def _changed(name: str, before: ProvenPart, after: ProvenPart) -> list[str]:
    old, new = before.attempt.candidate, after.attempt.candidate
    changes = _changed_block(name, old, new)
    if old.block == new.block and (added := sorted(new.parameters.keys() - old.parameters.keys())):
        changes.append(f"{name}: with {', '.join(added)}")
    return changes + _rewired(name, before.factors, after.factors)


def _changed_block(name: str, old: Candidate, new: Candidate) -> list[str]:
    """Which arguments have other evidence, those of blocks inside one by one; of another block only that it is one."""
    if old.block != new.block:
        return [f"{name}: {old.block} -> {new.block}"]
    changes = []
    for argument, evidence in sorted(new.arguments.items()):
        was, where = old.arguments.get(argument), f"{name}.{argument}"
        if isinstance(was, Candidate) and isinstance(evidence, Candidate):
            changes += _changed_block(where, was, evidence)
        elif was is None or was.label != evidence.label:
            changes.append(f"{where}: {was.label if was else 'not there'} -> {evidence.label}")
    return changes


def _rewired(name: str, before: Mapping[str, Evidence], after: Mapping[str, Evidence]) -> list[str]:
    old = {term: evidence.label for term, evidence in before.items()}
    new = {term: evidence.label for term, evidence in after.items()}
    return [f"{name}: {term} by {label}" for term, label in new.items() if old.get(term) != label]
