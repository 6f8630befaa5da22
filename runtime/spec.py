"""ModelSpec: the whole model as data. Onboarding writes it as spec.json; the plan and the reports read it."""

import inspect
from typing import Any, Literal

from pydantic import Field, TypeAdapter, model_validator

from dayzero.runtime import nn
from dayzero.runtime.record import Record
from dayzero.runtime.weights import Concat, Rule, Source, Stack, Stored, Transpose

ProofStatus = Literal["proven", "lifted", "unverified"]


class Proof(Record):
    """Why a block stands for its reference module.

    module: the reference module's path. error: upper bound of the worst relative error over outputs, input gradients
    and parameter gradients, float64. evidence: one line each, what decided the parameters.
    """

    status: ProofStatus
    module: str
    error: float | None = None
    evidence: list[str] = Field(default_factory=list)


class BlockSpec(Record):
    """One block of `dayzero.runtime.nn` and the arguments it is built with, checked against its constructor."""

    block: str
    arguments: dict[str, Any]
    proof: Proof | None = None

    @model_validator(mode="after")
    def _arguments_fit(self) -> "BlockSpec":
        if self.block not in nn.BLOCKS:
            raise ValueError(f"no block {self.block!r}; there are {', '.join(sorted(nn.BLOCKS))}")
        signature = inspect.signature(nn.BLOCKS[self.block].__init__)
        parameters = {name: p for name, p in signature.parameters.items() if name != "self"}
        if unknown := sorted(self.arguments.keys() - parameters.keys()):
            raise ValueError(f"{self.block} has no argument {', '.join(unknown)}")
        for name, parameter in parameters.items():
            if name in self.arguments:
                TypeAdapter(parameter.annotation).validate_python(self.arguments[name], strict=True)
            elif parameter.default is inspect.Parameter.empty:
                raise ValueError(f"{self.block} needs the argument {name}")
        return self

    def build(self):
        """The module itself, parameters uninitialised."""
        return nn.BLOCKS[self.block](**self.arguments)


class LayerKind(Record):
    """The four blocks of a decoder layer."""

    mixer_norm: BlockSpec
    mixer: BlockSpec
    ffn_norm: BlockSpec
    ffn: BlockSpec


class LayerRun(Record):
    """`count` consecutive layers of kind `kind`, an index into `ModelSpec.layer_kinds`."""

    first: int
    count: int
    kind: int


class SourceSpec(Record):
    """A weight expression (`runtime.weights`) as data."""

    op: Literal["stored", "stack", "concat", "transpose"]
    name: str | None = None
    over: str | None = None
    count: int | None = None
    dim: int | None = None
    parts: list["SourceSpec"] = Field(default_factory=list)

    @classmethod
    def of(cls, source: Source) -> "SourceSpec":
        """The data of an expression."""
        match source:
            case Stored(name):
                return cls(op="stored", name=name)
            case Stack(over, count, part):
                return cls(op="stack", over=over, count=count, parts=[cls.of(part)])
            case Concat(dim, parts):
                return cls(op="concat", dim=dim, parts=[cls.of(part) for part in parts])
            case Transpose(part):
                return cls(op="transpose", parts=[cls.of(part)])
        raise TypeError(f"{source!r} is not a weight expression")

    def build(self) -> Source:
        parts = tuple(part.build() for part in self.parts)
        match self.op:
            case "stored":
                assert self.name is not None
                return Stored(self.name)
            case "stack":
                assert self.over is not None
                assert self.count is not None
                return Stack(self.over, self.count, parts[0])
            case "concat":
                assert self.dim is not None
                return Concat(self.dim, parts)
            case "transpose":
                return Transpose(parts[0])


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


class ModelSpec(Record):
    """A decoder-only model. `layers` covers 0 .. n-1 in order, run-length coded over `layer_kinds`."""

    format: Literal[1] = 1
    name: str
    checkpoint: CheckpointId
    vocabulary: int
    hidden: int
    tied: bool
    rotary: BlockSpec | None
    layer_kinds: list[LayerKind]
    layers: list[LayerRun]
    norm: BlockSpec
    rules: list[RuleSpec]
    initializer_range: float = 0.02
    max_positions: int | None = None

    @property
    def layer_count(self) -> int:
        return sum(run.count for run in self.layers)

    def kinds_in_order(self) -> list[LayerKind]:
        """The kind of every layer, one by one."""
        return [self.layer_kinds[run.kind] for run in self.layers for _ in range(run.count)]

    def build(self) -> nn.CausalLM:
        """The model that the generated model.py builds, straight from this data."""
        layers = [
            nn.DecoderLayer(kind.mixer_norm.build(), kind.mixer.build(), kind.ffn_norm.build(), kind.ffn.build())
            for kind in self.kinds_in_order()
        ]
        rotary = nn.Rotary(**self.rotary.arguments) if self.rotary is not None else None
        return nn.CausalLM(self.vocabulary, self.hidden, layers, self.norm.build(), rotary, self.tied)
