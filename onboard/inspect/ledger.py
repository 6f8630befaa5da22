"""The ledger as data: a role and a fate for every tensor, a kind for every layer, and the evidence for each."""

import math
from collections import Counter
from typing import Any, Literal

from pydantic import Field

from dayzero.onboard.inspect.tensor_names import Group, counted, ranges
from dayzero.runtime.record import Record

Fate = Literal["mapped", "carried", "derived", "ignored", "open"]
Part = Literal["text", "mtp", "vision", "audio", "projector"]
Mixer = Literal[
    "full", "sliding", "latent", "sparse-indexed", "compressed", "linear", "state-space", "conv", "none", "unknown"
]
FeedForward = Literal["dense", "routed", "hashed", "none", "unknown"]
Residual = Literal["plain", "sandwich", "parallel", "attention-residual", "hyper-connections"]
CARRIED: dict[str, str] = {
    "mtp": "predicts further tokens; the language model does not use it",
    "vision": "not part of the language model",
    "audio": "not part of the language model",
    "projector": "not part of the language model",
}


class TensorGroup(Record):
    """Tensors of one pattern. layers, experts: ranges like `0-29`; others: of further placeholders, in their order.

    missing: how many names these ranges promise that are not there. bytes: of all tensors together. part: which part of
    the checkpoint it belongs to. fate: `carried` is exported as it is and not trained; so is `derived`, a table that
    the model computes by itself. parameter: the model parameter that they become; reason: why they are carried or
    ignored, or why their fate is open. note: what a reader should know. first: one of the names.

    Of a quantised weight, the group of its codes says the `format`, the `logical_shape` of the weight, and the `parts`
    it is stored as (role -> pattern); the groups of its scales say `part_of`, the pattern of the codes. Tensors that
    repeat others, as a head that is stored although it is tied, say `copy_of`, the pattern of those. unused: weights of
    mapped tensors that no parameter is made of: padding, or what is carried beside a part that is used.
    """

    pattern: str
    count: int
    dtype: str
    shape: list[int]
    bytes: int
    layers: str = ""
    experts: str = ""
    others: list[str] = Field(default_factory=list)
    missing: int = 0
    part: Part = "text"
    role: str
    fate: Fate = "open"
    parameter: str | None = None
    reason: str = ""
    note: str = ""
    format: str | None = None
    logical_shape: list[int] | None = None
    parts: dict[str, str] = Field(default_factory=dict)
    part_of: str | None = None
    copy_of: str | None = None
    unused: int = Field(default=0, exclude_if=lambda count: not count)

    @property
    def elements(self) -> int:
        """Weights in all tensors of the group: two for a byte of packed 4-bit codes, none for a scale."""
        return 0 if self.part_of is not None else self.count * math.prod(self.logical_shape or self.shape)


def extent(group: Group) -> dict[str, Any]:
    """How many tensors a group has, which, and how large: fields of a TensorGroup."""
    return {
        "count": len(group.names),
        "bytes": group.bytes,
        "layers": ranges(group.layers),
        "experts": ranges(group.experts),
        "others": [
            ranges(group.values(position))
            for position, name in enumerate(group.placeholders)
            if name not in {"layer", "expert"}
        ],
        "missing": len(group.missing()),
    }


class Experts(Record):
    count: int = 0
    top_k: int = 0
    shared: int = 0


class LayerRange(Record):
    """Layers of one kind, `0-2, 4-6`. evidence: what says so, one line each."""

    layers: str
    mixer: Mixer
    ffn: FeedForward
    residual: Residual = "plain"
    evidence: list[str]


class Finding(Record):
    """Something to know before the checkpoint is used. kind: `contradiction` between two sources, `damage` where
    tensors seem to be missing, `layout` that a careless loader gets wrong, `note` for the rest."""

    kind: Literal["contradiction", "damage", "layout", "note"]
    what: str
    evidence: list[str]


_LONGEST = 400  # characters of a line of evidence


def finding(kind: Literal["contradiction", "damage", "layout", "note"], what: str, *evidence: str) -> Finding:
    """A finding whose lines are short enough to be read."""
    lines = [line if len(line) <= _LONGEST else f"{line[: _LONGEST - 3]}..." for line in evidence]
    return Finding(kind=kind, what=what, evidence=lines)


class Ledger(Record):
    """unaccounted: names of tensors without a fate; before the rules are settled, of those whose role is unknown.
    unread_config: fields that nobody explains. maths_config: fields that change the maths and that the tensors cannot
    show, with what they change; the proof reads them. tied: head and embedding are one matrix. mtp: layers that predict
    further tokens, in the tensors."""

    tensors: int
    bytes: int
    parameters: int
    groups: list[TensorGroup]
    layers: list[LayerRange]
    experts: Experts
    tied: bool = False
    mtp: int = 0
    quantization: dict[str, Any] = Field(default_factory=dict)
    findings: list[Finding] = Field(default_factory=list)
    unaccounted: list[str] = Field(default_factory=list)
    unread_config: list[str] = Field(default_factory=list)
    maths_config: dict[str, str] = Field(default_factory=dict)

    def layer_counts(self) -> dict[str, dict[str, int]]:
        """{"mixer": {kind: layers}, "ffn": {kind: layers}}."""
        mixer: Counter[str] = Counter()
        ffn: Counter[str] = Counter()
        for run in self.layers:
            count = len(counted(run.layers))
            mixer[run.mixer] += count
            ffn[run.ffn] += count
        return {"mixer": dict(mixer), "ffn": dict(ffn)}

    def mapped_parameters(self) -> int:
        """Parameters of the model that the mapped tensors make."""
        return sum(
            group.elements - group.unused for group in self.groups if group.fate == "mapped" and group.copy_of is None
        )

    def formats(self) -> dict[str, int]:
        """Quantised format -> weights stored in it."""
        found: Counter[str] = Counter()
        for group in self.groups:
            if group.format is not None:
                found[group.format] += group.elements
        return dict(found.most_common())

    def budget(self) -> dict[str, dict[str, int]]:
        """Role -> parameters and bytes, largest first. Roles of one purpose stand together."""
        parameters: Counter[str] = Counter()
        size: Counter[str] = Counter()
        for group in self.groups:
            parameters[purpose(group)] += group.elements
            size[purpose(group)] += group.bytes
        return {name: {"parameters": count, "bytes": size[name]} for name, count in parameters.most_common()}

    def summary(self) -> dict[str, Any]:
        """What `onboard inspect --json` prints, but for the patterns."""
        return {
            "tensors": self.tensors,
            "bytes": self.bytes,
            "parameters": self.parameters,
            "layers": self.layer_counts(),
            "experts": self.experts.model_dump(),
            "quantization": finite(self.quantization),
            "formats": self.formats(),
            "tied": self.tied,
            "mtp": self.mtp,
            "budget": self.budget(),
            "findings": [finding.model_dump() for finding in self.findings],
            "unaccounted": self.unaccounted,
            "unread_config": self.unread_config,
            "maths_config": self.maths_config,
        }


def finite(value: Any) -> Any:
    """For JSON that every reader takes: infinities as text, tuples as lists."""
    if isinstance(value, dict):
        return {name: finite(held) for name, held in value.items()}
    if isinstance(value, (list, tuple)):
        return [finite(held) for held in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


_PURPOSES = {
    "expert": "routed experts",
    "shared expert": "shared experts",
    "shared expert gate": "shared experts",
    "expert latent": "latent projections of experts",
    "feed-forward": "dense feed-forward",
    "embedding": "embedding",
    "head": "head",
    "router": "routers",
    "router bias": "routers",
    "router table": "routers",
    "indexer": "indexers",
    "compressor": "compressors",
    "residual mixing": "residual mixing",
    "stream mixing": "residual mixing",
    "rotary table": "rotary tables",
    "unknown": "unknown",
}


def purpose(group: TensorGroup) -> str:
    """The line of the budget that a group belongs to."""
    if group.part != "text":
        return {"mtp": "further-token layers", "vision": "vision tower", "audio": "audio tower"}.get(
            group.part, group.part
        )
    if "norm" in group.role:
        return "norms"
    return _PURPOSES.get(group.role, "attention and other mixers")
