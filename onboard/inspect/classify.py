"""The ledger of a checkpoint: first what headers and config tell, then the fates that proven rules settle.

Evidence counts in this order: tensor names and shapes, the class in `architectures`, lists in the config, and last
`model_type`, which proves nothing. Roles only describe; what a tensor is used for is settled by the proven rules, which
give it its fate. A tensor without a fate is an error.
"""

from collections.abc import Mapping, Sequence

from dayzero.onboard.checkpoint import Checkpoint
from dayzero.onboard.config_fields import ConfigView
from dayzero.onboard.inspect.config_layers import compare
from dayzero.onboard.inspect.findings import all_findings, live_heads, tying
from dayzero.onboard.inspect.folded import Folded, fold_checkpoint
from dayzero.onboard.inspect.layer_kinds import Kind, kinds_of_layers
from dayzero.onboard.inspect.ledger import CARRIED, Experts, LayerRange, Ledger, TensorGroup, extent
from dayzero.onboard.inspect.packing import disagreements, packed_weights
from dayzero.onboard.inspect.roles import part_of, role_of
from dayzero.onboard.inspect.tensor_names import Group, pattern_of, ranges
from dayzero.onboard.rules.settle import settle
from dayzero.runtime.headers import TensorHeader
from dayzero.runtime.packed import QuantizedTensor

__all__ = ["Ledger", "classify", "settle"]


def classify(checkpoint: Checkpoint) -> Ledger:
    """From headers and config alone: roles and kinds. No fate is settled yet but that of what is carried through, and
    nothing counts as unaccounted but tensors whose role is unknown."""
    headers, view = checkpoint.headers, ConfigView(checkpoint.config)
    folded = fold_checkpoint(headers)
    weights, misfits = packed_weights(folded.groups, headers)
    groups = _with_notes(_tensor_groups(folded, weights, headers))
    text = [number for number, group in enumerate(groups) if group.part == "text" and group.part_of is None]
    kinds, found = compare(view, kinds_of_layers([folded.groups[n] for n in text], [groups[n].role for n in text]))
    mtp = _further_token_layers(folded, groups)
    found = [
        *all_findings(view, groups, folded.groups, kinds, mtp),
        *found,
        *misfits,
        *disagreements(groups, checkpoint.quantization),
    ]
    experts = _experts(view, groups, folded.groups)
    unread, maths = view.unread()
    return Ledger(
        tensors=len(headers),
        bytes=checkpoint.total_bytes,
        parameters=sum(group.elements for group in groups),
        groups=groups,
        layers=_runs(kinds),
        experts=experts,
        tied=tying(view, groups)[0],
        mtp=mtp,
        quantization=checkpoint.quantization,
        findings=found,
        unaccounted=[
            group.pattern if group.count > 1 else folded.groups[number].names[0]
            for number, group in enumerate(groups)
            if group.role == "unknown"
        ],
        unread_config=unread,
        maths_config=maths,
    )


def _tensor_groups(
    folded: Folded, weights: Sequence[QuantizedTensor | None], headers: Mapping[str, TensorHeader]
) -> list[TensorGroup]:
    numbers = {
        (group.pattern, group.dtype, group.shape, bool(folded.mtp & set(group.layers))): number
        for number, group in enumerate(folded.groups)
    }
    parts: dict[int, dict[str, int]] = {}
    part_of_codes: dict[int, int] = {}
    for number, weight in enumerate(weights):
        if weight is None:
            continue
        inside = bool(folded.mtp & set(folded.groups[number].layers))
        for role, name in weight.parts.items():
            header = headers[name]
            other = numbers[pattern_of(name)[0], header.dtype, header.shape, inside]
            parts.setdefault(number, {})[role] = other
            if other != number:
                part_of_codes[other] = number
    made = []
    for number, group in enumerate(folded.groups):
        weight = weights[number]
        codes = part_of_codes.get(number)
        named = group.pattern if codes is None else folded.groups[codes].pattern
        part = part_of(group.pattern)
        if part == "text" and folded.mtp & set(group.layers):
            part = "mtp"
        made.append(
            TensorGroup(
                pattern=group.pattern,
                dtype=group.dtype,
                shape=list(group.shape),
                **extent(group),
                part=part,
                role=role_of(named, group.shape),
                fate="carried" if part in CARRIED else "open",
                reason=CARRIED.get(part, ""),
                format=weight.format if weight else None,
                logical_shape=list(weight.shape) if weight else None,
                parts={role: folded.groups[other].pattern for role, other in parts.get(number, {}).items()},
                part_of=None if codes is None else folded.groups[codes].pattern,
            )
        )
    return made


def _with_notes(groups: list[TensorGroup]) -> list[TensorGroup]:
    live = live_heads(groups)
    notes = {pattern: f"the first {count} are heads, the rest is padding" for pattern, count in live.items()}
    return [
        group.model_copy(update={"note": notes[group.pattern]}) if group.pattern in notes else group for group in groups
    ]


def _further_token_layers(folded: Folded, groups: Sequence[TensorGroup]) -> int:
    numbered = {
        layer for group, made in zip(folded.groups, groups, strict=True) if made.part == "mtp" for layer in group.layers
    }
    return len(numbered) or int(any(group.part == "mtp" for group in groups))


def _runs(kinds: Mapping[int, Kind]) -> list[LayerRange]:
    """Layers of one kind and the same evidence together, in the order of their first layers."""
    together: dict[tuple[Kind, tuple[str, ...]], list[int]] = {}
    for layer, kind in kinds.items():
        together.setdefault((kind, kind.evidence), []).append(layer)
    return [
        LayerRange(
            layers=ranges(layers), mixer=kind.mixer, ffn=kind.ffn, residual=kind.residual, evidence=list(evidence)
        )
        for (kind, evidence), layers in together.items()
    ]


def _experts(view: ConfigView, groups: Sequence[TensorGroup], folded: Sequence[Group]) -> Experts:
    """Count from names or stacked shapes, shared ones from widths; how many a token gets only the config knows."""
    pairs = [
        (group, raw)
        for group, raw in zip(groups, folded, strict=True)
        if group.part == "text" and group.part_of is None and len(group.logical_shape or group.shape) > 1
    ]
    routed = [(group, raw) for group, raw in pairs if group.role == "expert"]
    if not routed:
        return Experts()
    numbered = {number for _, raw in routed for number in raw.experts}
    stacked = [group.shape[0] for group, raw in routed if not raw.experts and len(group.shape) > 2]
    shared = [group for group, _ in pairs if group.role == "shared expert"]
    width, shared_width = _width([group for group, _ in routed]), _width(shared)
    by_width = shared_width // width if width and shared_width and shared_width % width == 0 else 0
    return Experts(
        count=len(numbered) or max(stacked, default=0),
        top_k=view.size("top_k") or 0,
        shared=(by_width or view.size("shared_experts") or 1) if shared else 0,
    )


def _width(groups: Sequence[TensorGroup]) -> int:
    """The inner width: the columns of the matrix that leads back to the hidden size."""
    for group in groups:
        if any(word in group.pattern for word in ("down_proj", ".w2", "wo.")):
            shape = group.logical_shape or group.shape
            return shape[-1]
    return 0
