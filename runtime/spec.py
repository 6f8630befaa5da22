"""ModelSpec: the whole model as data. Onboarding writes it as spec.json; the plan and the reports read it."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, model_serializer
from torch import nn as torch_nn

from dayzero.runtime import nn
from dayzero.runtime.block_spec import BlockSpec, Proof
from dayzero.runtime.nn.lifted_source import classes_of
from dayzero.runtime.record import Record
from dayzero.runtime.weights import NODES, Rule, Source

__all__ = [
    "AgainSpec", "BlockSpec", "CheckpointId", "LayerKind", "LayerRun", "LoopSpec", "ModelSpec", "PartSpec", "Proof",
    "RuleSpec", "SourceSpec", "StepSpec",
]  # fmt: skip


class PartSpec(Record):
    """One part of a layer. reads: the sum that it reads (`runtime.nn.wiring`), over "x" and parts before it; several of
    them, with commas between, for a part with several inputs. shared: other layers have the very same part."""

    name: str = Field(pattern=r"^[a-z][a-z0-9_]*$")
    block: BlockSpec
    reads: str
    shared: bool = Field(default=False, exclude_if=lambda shared: not shared)


class StepSpec(Record):
    """A value of a later pass: the part that makes it, and what that reads."""

    name: str
    part: str
    reads: str


class AgainSpec(Record):
    """How a layer that runs several times is wired in passes after the first (`runtime.nn.DecoderLayer`). parts: those
    that run only then, each with what it reads the first time."""

    parts: list[PartSpec]
    steps: list[StepSpec]
    gives: str


class LayerKind(Record):
    """A kind of decoder layer: its parts in the order in which they run, and the sum that it gives. keeps: the sum that
    it keeps for later layers, where they look back (`ModelSpec.history`). again: its other wiring in later passes."""

    parts: list[PartSpec]
    gives: str
    keeps: str = Field(default="", exclude_if=lambda keeps: not keeps)
    again: AgainSpec | None = Field(default=None, exclude_if=lambda again: again is None)

    @classmethod
    def pre_norm(cls, mixer_norm: BlockSpec, mixer: BlockSpec, ffn_norm: BlockSpec, ffn: BlockSpec) -> "LayerKind":
        """The commonest wiring: each of mixer and ffn reads a norm of the stream and is added to it."""
        return cls(
            parts=[
                PartSpec(name="mixer_norm", block=mixer_norm, reads="x"),
                PartSpec(name="mixer", block=mixer, reads="mixer_norm"),
                PartSpec(name="ffn_norm", block=ffn_norm, reads="x + mixer"),
                PartSpec(name="ffn", block=ffn, reads="ffn_norm"),
            ],
            gives="x + mixer + ffn",
        )

    @property
    def blocks(self) -> dict[str, BlockSpec]:
        """Part name -> block."""
        return {part.name: part.block for part in self.all_parts}

    @property
    def all_parts(self) -> list[PartSpec]:
        """Those of the first pass, then those that run only in later ones."""
        return [*self.parts, *(self.again.parts if self.again is not None else ())]

    def build(
        self,
        lifted: Mapping[str, type] | None = None,
        shared: Mapping[str, torch_nn.Module] | None = None,
        use: int = 0,
    ) -> nn.DecoderLayer:
        """The layer itself, parameters uninitialised. lifted: classes of the model's lifted source. shared: its shared
        parts, of which it is use number `use`; where they are not given it has its own."""
        held = shared or {}
        parts = {part.name: part.block.build(lifted) for part in self.all_parts if part.name not in held}
        reads = {part.name: part.reads for part in self.parts}
        again = None if self.again is None else {step.name: (step.part, step.reads) for step in self.again.steps}
        gives = "" if self.again is None else self.again.gives
        return nn.DecoderLayer(parts, reads, self.gives, self.keeps, held, use, again, gives)

    def build_shared(self, lifted: Mapping[str, type] | None = None) -> dict[str, torch_nn.Module]:
        """The parts that other layers have too, by name."""
        return {part.name: part.block.build(lifted) for part in self.parts if part.shared}


class LayerRun(Record):
    """`count` consecutive layers of kind `kind`, an index into `ModelSpec.layer_kinds`. shared: which of
    `ModelSpec.shared` their shared parts are."""

    first: int
    count: int
    kind: int
    shared: int | None = Field(default=None, exclude_if=lambda shared: shared is None)


class LoopSpec(Record):
    """Layers that run several times: `runtime.nn.Loop`."""

    first: int
    count: int
    passes: int
    restarts: bool = False
    message: BlockSpec | None = None

    def build(self, lifted: Mapping[str, type] | None = None) -> nn.Loop:
        message = None if self.message is None else self.message.build(lifted)
        return nn.Loop(self.first, self.count, self.passes, self.restarts, message)


class SourceSpec(Record):
    """A weight expression (`runtime.weights`) as data: `op` names the node, the fields are its own; others are left
    out. tensors: role -> name."""

    op: Literal[
        "stored", "decoded", "stack", "concat", "transpose", "flatten", "unflatten", "squeeze", "unsqueeze", "part",
        "excerpt", "trim", "interleave", "deinterleave", "cast", "tie",
    ]  # fmt: skip
    name: str | None = None
    over: str | None = None
    count: int | None = None
    dim: int | None = None
    dims: tuple[int, ...] | None = None
    start: int | None = None
    stop: int | None = None
    groups: int | None = None
    size: int | None = None
    ways: int | None = None
    block: int | None = None
    to: Literal["bfloat16", "float16", "float32"] | None = None
    format: str | None = None
    tensors: dict[str, str] | None = None
    parts: list["SourceSpec"] = Field(default_factory=list)

    @classmethod
    def of(cls, source: Source) -> "SourceSpec":
        """The data of an expression. Raises TypeError for anything else."""
        ops = [op for op, node in NODES.items() if type(source) is node]
        if not ops:
            raise TypeError(f"{source!r} is not a weight expression")
        held = source.settings()
        if "tensors" in held:
            held["tensors"] = dict(held["tensors"])
        return cls(op=ops[0], parts=[cls.of(child) for child in source.children], **held)  # type: ignore[arg-type]

    def build(self) -> Source:
        """The expression. Raises ValueError for fields that are not those of `op`."""
        node = NODES[self.op]
        held = {name: value for name in type(self).model_fields if (value := getattr(self, name)) is not None}
        held.pop("op")
        held.pop("parts")
        if "tensors" in held:
            held["tensors"] = tuple(held["tensors"].items())
        children = tuple(part.build() for part in self.parts)
        names = {field.name for field in fields(node)}  # type: ignore[arg-type]
        if "parts" in names:
            held["parts"] = children
        elif "part" in names and len(children) == 1:
            held["part"] = children[0]
        elif children:
            raise ValueError(f"{self.op} over {len(children)} expressions")
        try:
            return node(**held)
        except TypeError as error:
            raise ValueError(f"{self.op}: {error}") from None

    @model_serializer(mode="wrap")
    def _without_what_is_not_there(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        return {name: value for name, value in handler(self).items() if value is not None and value != []}


class RuleSpec(Record):
    """A weight rule as data. ranges: placeholder -> (start, stop) or (start, stop, step)."""

    parameter: str
    source: SourceSpec
    ranges: dict[str, tuple[int, int] | tuple[int, int, int]] = Field(default_factory=dict)

    def build(self) -> Rule:
        ranges = {name: range(*bounds) for name, bounds in self.ranges.items()}
        return Rule(self.parameter, self.source.build(), ranges)


class CheckpointId(Record):
    """Which checkpoint a package was made from. headers_sha256 covers every tensor's name, dtype, shape and file."""

    architecture: str
    config_sha256: str
    headers_sha256: str
    tensors: int
    bytes: int
    dtypes: dict[str, int]  # safetensors dtype name -> tensors


class EncoderSpec(Record):
    """The encoder beside the decoder (`runtime.nn.encoder`). layers: over the model's `layer_kinds`. own_embedding: it
    does not read the decoder's."""

    layers: list[LayerRun]
    norm: BlockSpec
    own_embedding: bool = False
    embed_scale: float = 1.0
    positions: BlockSpec | None = None

    @property
    def kinds(self) -> list[int]:
        """The kind of every layer, one by one."""
        return [run.kind for run in self.layers for _ in range(run.count)]


class ModelSpec(Record):
    """A decoder, and an encoder where it looks at one. `layers` covers 0 .. n-1 in order, run-length coded over
    `layer_kinds`. shared: sets of parts that several layers have, each as the kind whose shared parts it has."""

    format: Literal[1] = 1
    name: str
    checkpoint: CheckpointId
    vocabulary: int
    hidden: int
    tied: bool
    rotaries: list[BlockSpec] = Field(default_factory=list)
    query_scale: BlockSpec | None = None
    embed_scale: float = 1.0
    embed_norm: BlockSpec | None = None
    head_bias: bool = False
    logit_scale: float = 1.0
    logit_softcap: float | None = None
    logit_rows: int | None = None
    streams: int = 1
    merge: BlockSpec | None = None
    head_rows: int | None = Field(default=None, exclude_if=lambda rows: rows is None)
    history: bool = Field(default=False, exclude_if=lambda history: not history)
    positions: BlockSpec | None = Field(default=None, exclude_if=lambda positions: positions is None)
    layer_inputs: BlockSpec | None = Field(default=None, exclude_if=lambda inputs: inputs is None)
    encoder: EncoderSpec | None = Field(default=None, exclude_if=lambda encoder: encoder is None)
    loop: LoopSpec | None = Field(default=None, exclude_if=lambda loop: loop is None)
    layer_kinds: list[LayerKind]
    layers: list[LayerRun]
    shared: list[int] = Field(default_factory=list, exclude_if=lambda shared: not shared)
    norm: BlockSpec
    rules: list[RuleSpec]
    initializer_range: float = 0.02
    max_positions: int | None = None
    lifted: str = ""  # source text of the classes that `Lifted` blocks name: lifted.py

    @property
    def tokens(self) -> int:
        """Token ids that the model both reads and writes: a padded head, or one of its own, may have other rows."""
        rows = (self.vocabulary, self.logit_rows, self.head_rows)
        return min(count for count in rows if count is not None)

    @property
    def unverified(self) -> bool:
        """Whether there are blocks that nothing was compared with: onboarding had no reference."""
        return any(block.proof is not None and block.proof.status == "unverified" for block in self.blocks())

    @property
    def layer_count(self) -> int:
        return sum(run.count for run in self.layers)

    def kinds_in_order(self) -> list[LayerKind]:
        """The kind of every layer of the decoder, one by one."""
        return [self.layer_kinds[run.kind] for run in self.layers for _ in range(run.count)]

    def uses(self) -> list[tuple[LayerKind, int | None, int]]:
        """For every layer of the decoder its kind, the set of shared parts that it has, and how many layers before it
        have the same."""
        found: list[tuple[LayerKind, int | None, int]] = []
        for run in self.layers:
            for _ in range(run.count):
                use = sum(which == run.shared for _, which, _ in found) if run.shared is not None else 0
                found.append((self.layer_kinds[run.kind], run.shared, use))
        return found

    def stacks(self) -> dict[str, list[LayerKind]]:
        """Path of the list -> the kind of each of its layers, in the order in which they run: of the encoder too."""
        encoder = [self.layer_kinds[kind] for kind in self.encoder.kinds] if self.encoder is not None else []
        return {**({"encoder.layers": encoder} if encoder else {}), "layers": self.kinds_in_order()}

    @property
    def held_kinds(self) -> list[int]:
        """The kind of every layer, of the encoder too, each once."""
        own = [run.kind for run in self.layers for _ in range(run.count)]
        return [*(self.encoder.kinds if self.encoder is not None else []), *own]

    @property
    def used_kinds(self) -> list[int]:
        """The kind of every layer in the order in which they run, of the encoder too; of those that run several times,
        each time."""
        own = [run.kind for run in self.layers for _ in range(run.count)]
        if (loop := self.loop) is not None:
            looped = slice(loop.first, loop.first + loop.count)
            own[looped] = own[looped] * loop.passes
        return [*(self.encoder.kinds if self.encoder is not None else []), *own]

    def one_of_each_kind(self) -> tuple["ModelSpec", list[int]]:
        """The same model with one layer of each kind, and the kinds of its layers in the order in which they run."""

        def once(runs: list[LayerRun]) -> list[LayerRun]:
            first = {run.kind: run for run in reversed(runs)}
            one = [first[kind] for kind in sorted(first)]
            return [run.model_copy(update={"first": place, "count": 1}) for place, run in enumerate(one)]

        own = once(self.layers)
        encoder = None
        if self.encoder is not None:
            encoder = self.encoder.model_copy(update={"layers": once(self.encoder.layers)})
        made = self.model_copy(update={"layers": own, "encoder": encoder, "rules": [], "loop": None})
        return made, made.used_kinds

    def build(self, lifted: Mapping[str, type] | None = None) -> nn.CausalLM:
        """The model that the generated model.py builds, straight from this data. Executes its lifted source, if any,
        where no other classes are given for it, by name."""
        lifted = classes_of(self.lifted) if lifted is None else lifted

        def built(block: BlockSpec | None) -> Any:
            return None if block is None else block.build(lifted)

        shared = [self.layer_kinds[kind].build_shared(lifted) for kind in self.shared]
        return nn.CausalLM(
            vocabulary=self.vocabulary,
            hidden=self.hidden,
            layers=[
                kind.build(lifted, None if which is None else shared[which], use) for kind, which, use in self.uses()
            ],
            shared=shared,
            norm=built(self.norm),
            rotaries=[built(rotary) for rotary in self.rotaries],
            query_scale=built(self.query_scale) if self.query_scale is not None else None,
            tied=self.tied,
            embed_scale=self.embed_scale,
            embed_norm=built(self.embed_norm),
            head_bias=self.head_bias,
            logit_scale=self.logit_scale,
            logit_softcap=self.logit_softcap,
            logit_rows=self.logit_rows,
            streams=self.streams,
            merge=built(self.merge),
            history=self.history,
            head_rows=self.head_rows,
            positions=built(self.positions),
            layer_inputs=built(self.layer_inputs),
            loop=None if self.loop is None else self.loop.build(lifted),
            encoder=None if self.encoder is None else self._encoder(self.encoder, lifted),
        )

    def _encoder(self, encoder: EncoderSpec, lifted: Mapping[str, type]) -> nn.Encoder:
        return nn.Encoder(
            layers=[self.layer_kinds[kind].build(lifted) for kind in encoder.kinds],
            norm=encoder.norm.build(lifted),
            vocabulary=self.vocabulary if encoder.own_embedding else None,
            hidden=self.hidden,
            embed_scale=encoder.embed_scale,
            positions=None if encoder.positions is None else encoder.positions.build(lifted),
        )

    def blocks(self) -> list[BlockSpec]:
        """Every distinct block, layers first."""
        found: list[BlockSpec] = []
        layers = [block for kind in self.layer_kinds for block in kind.blocks.values()]
        outside = [
            self.norm,
            *(block for block in (self.embed_norm, self.merge, self.query_scale, self.positions) if block is not None),
            *([self.layer_inputs] if self.layer_inputs is not None else []),
            *([self.loop.message] if self.loop is not None and self.loop.message is not None else []),
            *self.rotaries,
        ]
        if self.encoder is not None:
            outside += [block for block in (self.encoder.norm, self.encoder.positions) if block is not None]
        for block in (*layers, *outside):
            if block not in found:
                found.append(block)
        return found
