"""What holds for a shrunk model: every part of every layer and what stands for it; and what stays open."""

from dataclasses import dataclass, field
from typing import Any

from dayzero.onboard.candidates import Candidate, Evidence
from dayzero.onboard.prove.block import Attempt
from dayzero.onboard.prove.rotary_tables import ProvenRotary
from dayzero.onboard.structure.discover import ModelParts
from dayzero.onboard.structure.encoder import EncoderParts
from dayzero.onboard.structure.loops import LoopParts
from dayzero.onboard.structure.units import Unit


@dataclass
class Unproven:
    """One thing that stands between a checkpoint and its adapter. tried: the nearest candidates and their misses. todo:
    what a person can do. also: modules of its kind elsewhere in the model, which are open for the same reason. layers:
    those of the checkpoint that are like the small model's ones in `where` and `also`; "" where that says nothing."""

    where: str
    why: str
    tried: list[str] = field(default_factory=list)
    todo: str = ""
    also: list[str] = field(default_factory=list)
    layers: str = ""


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
        """Relative to the layer, the module that the block stands for: the layer where there is none of its own."""
        return self.unit.path if self.unit.is_module else ""

    @property
    def is_layer(self) -> bool:
        """Whether it stands for the whole layer, or for something of the layer that is no module."""
        return not self.path


@dataclass
class ProvenStep:
    """A value of a later pass: the name of the part that makes it, and the sums that this reads."""

    name: str
    part: str
    reads: list[dict[str, Evidence]]


@dataclass
class ProvenAgain:
    """How a layer is wired in passes after the first. parts: those that run only then."""

    parts: list[ProvenPart]
    steps: list[ProvenStep]
    gives: dict[str, Evidence]


@dataclass
class ProvenLoop:
    """How often layers run, and what makes what they are handed of the pass before."""

    parts: LoopParts
    passes: Evidence
    message: Attempt | None


@dataclass
class ProvenLayer:
    """The parts of a layer in order, and the sum it gives. keeps: what it keeps for later layers. again: of a layer
    that runs several times."""

    parts: list[ProvenPart]
    gives: dict[str, Evidence]
    keeps: dict[str, Evidence] = field(default_factory=dict)
    again: ProvenAgain | None = None

    @property
    def all_parts(self) -> list[ProvenPart]:
        """Those of the first pass, then those that run only in later ones."""
        return [*self.parts, *(self.again.parts if self.again is not None else ())]

    @property
    def attempts(self) -> dict[str, Attempt]:
        """Part name -> what stands for it."""
        return {part.unit.name: part.attempt for part in self.parts}


@dataclass
class ProvenEncoder:
    """What holds for the encoder of the shrunk model. signatures: of its layers (`shrink.layers.layer_signatures`)."""

    parts: EncoderParts
    layers: list[ProvenLayer]
    signatures: list[Any]
    norm: Attempt
    own_embedding: bool
    embed_scale: Evidence
    positions: Candidate | None = None


@dataclass
class Proven:
    """What holds for the shrunk model. positions: of what is added to the embeddings. keeps_first: whether
    layers read the input of the first one. contradictions: module whose code was copied although it does not compute
    what it says -> what is wrong with it. layer_inputs: of the module that holds the layers."""

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
    positions: Candidate | None = None
    encoder: ProvenEncoder | None = None
    contradictions: dict[str, str] = field(default_factory=dict)
    keeps_first: bool = False
    layer_inputs: Candidate | None = None
    loop: ProvenLoop | None = None

    @property
    def stacks(self) -> dict[str, list[ProvenLayer]]:
        """Path of the list in the reference -> its layers, of the encoder too."""
        encoder = {self.encoder.parts.layers: self.encoder.layers} if self.encoder is not None else {}
        return {self.parts.layers: self.layers, **encoder}

    @property
    def candidates(self) -> list[Candidate]:
        """Everything that was proven, layers first."""
        layers = [part.attempt.candidate for held in self.stacks.values() for layer in held for part in layer.all_parts]
        last = None if self.encoder is None else self.encoder.norm
        message = None if self.loop is None else self.loop.message
        norms = (self.norm, self.embed_norm, self.merge, last, message)
        outside = [attempt.candidate for attempt in norms if attempt is not None]
        return [*layers, *outside]

    @property
    def made_of(self) -> set[str]:
        """Names of the reference's tensors that what was proven is made of."""
        return {
            f"{path}.{name}"
            for path, candidate in self.claims.items()
            for source in candidate.parameters.values()
            for name in source.names({})
        }

    @property
    def claims(self) -> dict[str, Candidate]:
        """Path -> what was proven for the module there."""
        parts = self.parts
        found = {parts.norm: self.norm.candidate}
        if self.encoder is not None:
            found[self.encoder.parts.norm] = self.encoder.norm.candidate
        if self.loop is not None and self.loop.message is not None:
            found[str(self.loop.parts.message)] = self.loop.message.candidate
        for path, layers in self.stacks.items():
            for index, layer in enumerate(layers):
                for part in layer.all_parts:
                    if part.path:
                        found[f"{path}.{index}.{part.path}"] = part.attempt.candidate
        return found
