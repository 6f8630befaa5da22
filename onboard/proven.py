"""What holds for a shrunk model: every part of every layer and what stands for it; and what stays open."""

from dataclasses import dataclass, field

from dayzero.onboard.candidates import Candidate, Evidence
from dayzero.onboard.discover import ModelParts
from dayzero.onboard.layer_wiring import Unit
from dayzero.onboard.prove import Attempt
from dayzero.onboard.rotary_tables import ProvenRotary


@dataclass
class Unproven:
    """One thing that stands between a checkpoint and its adapter. tried: the nearest candidates and their misses."""

    where: str
    why: str
    tried: list[str] = field(default_factory=list)


class NotProven(Exception):
    """The checkpoint is beyond what can be proven; nothing may be generated."""

    def __init__(self, unproven: list[Unproven]):
        self.unproven = unproven
        super().__init__("; ".join(f"{item.where}: {item.why}" for item in unproven))


@dataclass
class ProvenPart:
    """A unit of a layer and what stands for it. factors: of what it reads, by name. tables: for each pair of rotary
    tables that the reference hands it, which of the model's it is. more: of what it reads beside that."""

    unit: Unit
    attempt: Attempt
    factors: dict[str, Evidence]
    tables: list[int]
    more: list[dict[str, Evidence]] = field(default_factory=list)

    @property
    def path(self) -> str:
        """Relative to the layer, the module that the block stands for: the layer itself where that owns a scale."""
        return "" if self.unit.role == "scale" else self.unit.path


@dataclass
class ProvenLayer:
    """The parts of a layer in order, and the sum it gives. keeps: what it keeps for later layers."""

    parts: list[ProvenPart]
    gives: dict[str, Evidence]
    keeps: dict[str, Evidence] = field(default_factory=dict)

    @property
    def attempts(self) -> dict[str, Attempt]:
        """Part name -> what stands for it."""
        return {part.unit.name: part.attempt for part in self.parts}


@dataclass
class Proven:
    """What holds for the shrunk model."""

    parts: ModelParts
    layers: list[ProvenLayer]
    norm: Attempt
    embed_norm: Attempt | None
    rotaries: list[ProvenRotary]
    query_scale: Candidate | None
    tied: bool
    embed_scale: Evidence
    logit_scale: Evidence
    logit_softcap: Evidence | None
    logit_rows: Evidence | None
    merge: Attempt | None = None

    @property
    def candidates(self) -> list[Candidate]:
        """Everything that was proven, layers first."""
        layers = [part.attempt.candidate for layer in self.layers for part in layer.parts]
        outside = [attempt.candidate for attempt in (self.norm, self.embed_norm, self.merge) if attempt is not None]
        return [*layers, *outside]

    @property
    def claims(self) -> dict[str, Candidate]:
        """Path -> what was proven for the module there."""
        parts = self.parts
        found = {parts.norm: self.norm.candidate}
        for index, layer in enumerate(self.layers):
            for part in layer.parts:
                if part.path:
                    found[f"{parts.layers}.{index}.{part.path}"] = part.attempt.candidate
        return found
