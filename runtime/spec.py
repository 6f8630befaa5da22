"""ModelSpec: the whole model as data. Onboarding writes it as spec.json; the plan and the reports read it."""

import inspect
from dataclasses import fields
from typing import Any, Literal

from pydantic import Field, SerializerFunctionWrapHandler, TypeAdapter, model_serializer, model_validator

from dayzero.runtime import nn
from dayzero.runtime.record import Record
from dayzero.runtime.weights import NODES, Rule, Source

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
    """A weight expression (`runtime.weights`) as data: `op` names the node, the fields are its own; others are left
    out. tensors: role -> name."""

    op: Literal[
        "stored", "decoded", "stack", "concat", "transpose", "flatten", "unflatten", "squeeze", "unsqueeze", "part",
        "trim", "interleave", "deinterleave", "cast", "tie",
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
