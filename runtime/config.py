"""The settings of a training run: a package's train.yaml, overridden by `--set section.key=value`."""

import difflib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dayzero.runtime.errors import InputError
from dayzero.runtime.moments import Kept
from dayzero.runtime.parameter_roles import ROLES, Role
from dayzero.runtime.precision import Precision


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", validate_default=True)


class Train(Section):
    """What is trained, and for how long."""

    mode: Literal["lora", "full"] = Field(default="lora", description="lora: adapters only; full: every parameter")
    init: Literal["checkpoint", "random"] = Field(default="checkpoint", description="where the weights come from")
    steps: int = Field(default=100, ge=1, description="optimizer steps")
    accumulation: int = Field(default=1, ge=1, description="batches of every rank in one step")
    precision: Precision = Field(default="bf16", description="bf16: compute in bfloat16, update in float32; or fp32")
    seed: int = Field(default=0, ge=0, description="of adapters, dropout, random weights and the data order")
    deterministic: bool = Field(default=True, description="the same run gives the same losses, bit for bit")
    indexer_loss: Literal["none", "selected", "all"] = Field(
        default="none",
        description="what trains indexers of sparse attention: the keys they select, or all",
    )
    max_skipped: int = Field(
        default=3, ge=0, description="steps in a row that are left out for a loss that is no number"
    )
    timeout: float = Field(default=30.0, gt=0, description="minutes that a rank waits for the others")
    allow_unverified: bool = Field(
        default=False, description="train a package although nothing of it was compared with a reference"
    )


class Data(Section):
    """How examples become batches."""

    max_length: int = Field(default=1024, ge=1, description="longer examples are cut to this many tokens")
    tokens_per_rank: int = Field(default=4096, ge=1, description="room for whole examples in a rank's batch")

    @model_validator(mode="after")
    def _an_example_fits(self) -> Self:
        if self.max_length > self.tokens_per_rank:
            raise ValueError(f"max_length {self.max_length} does not fit into tokens_per_rank {self.tokens_per_rank}")
        return self


class Group(Section):
    """What differs for the parameters of one role."""

    lr: float = Field(default=1.0, gt=0, description="times optimizer.lr")
    weight_decay: float | None = Field(default=None, ge=0, description="null: optimizer.weight_decay, 0 for vectors")
    name: Literal["adamw", "muon"] | None = Field(default=None, description="null: as optimizer.name says")


class Optimizer(Section):
    """AdamW or Muon, with warmup and cosine decay."""

    name: Literal["adamw", "muon"] = Field(default="adamw", description="muon: for matrices and experts; adamw for all")
    lr: float = Field(default=1e-4, gt=0, description="peak learning rate")
    warmup: int = Field(default=10, ge=0, description="steps up to the peak")
    floor: float = Field(default=0.1, ge=0, le=1, description="last learning rate, as a part of the peak")
    betas: tuple[float, float] = Field(default=(0.9, 0.95), description="decay of the two moments")
    eps: float = Field(default=1e-8, gt=0, description="added to the root of the second moment")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="of muon")
    weight_decay: float = Field(default=0.0, ge=0, description="of matrices; vectors do not decay")
    clip: float = Field(default=1.0, gt=0, description="largest norm of all gradients together")
    states: Kept = Field(default="fp32", description="how moments of matrices are kept: fp32, bf16 or 8bit")
    offload: bool = Field(default=False, description="keep moments in host memory between steps")
    groups: dict[Role, Group] = Field(
        default={}, description="by role, e.g. {router: {lr: 0.1, weight_decay: 0}}; roles: " + ", ".join(ROLES)
    )


class Lora(Section):
    """Adapters, with train.mode=lora."""

    rank: int = Field(default=16, ge=1, description="width of the adapters")
    alpha: float = Field(default=32.0, gt=0, description="adapters are scaled by alpha / rank")
    dropout: float = Field(default=0.0, ge=0, lt=1, description="on the adapters' input")
    targets: list[str] | Literal["auto"] = Field(default="auto", description="linear layers by name, or auto")


class Parallel(Section):
    """How the ranks share the model."""

    ep: int | Literal["auto"] = Field(default="auto", description="ranks that share the experts of a layer, or auto")
    dp_replicate: int | Literal["auto"] = Field(
        default="auto", description="copies of the sharded dense layers, or auto"
    )
    tp: int | Literal["auto"] = Field(
        default="auto", description="ranks that cut every dense layer and share a batch; auto: 1 if that fits"
    )
    cp: int | Literal["auto"] = Field(
        default="auto", description="ranks that each hold a part of the tokens of a batch; auto: 1 if that fits"
    )

    prefetch: Literal["auto", 0, 1, 2] = Field(
        default="auto", description="0: gather no layer early; 1: the next; 2: its experts in backward too; or auto"
    )

    @model_validator(mode="after")
    def _positive(self) -> Self:
        for name in ("ep", "dp_replicate", "tp", "cp"):
            size = getattr(self, name)
            if size != "auto" and size < 1:
                raise ValueError(f"{name} is {size}, expected 1 or more")
        return self


class Experts(Section):
    """How tokens reach routed experts."""

    dispatcher: Literal["alltoall", "allgather", "fused"] = Field(
        default="alltoall",
        description="alltoall: tokens go where they are needed; allgather: every token to every rank; "
        "fused: by operators of an NPU",
    )
    parts: int = Field(default=1, ge=1, description="parts in which tokens travel while others compute")
    capacity: float | None = Field(
        default=None, gt=0, description="most copies of an expert, as a multiple of the mean; null for no limit"
    )
    pad: bool = Field(default=False, description="with a capacity: fill every expert's batch up to it")
    merge_below: int = Field(default=0, ge=0, description="rows of every expert that are computed in one padded batch")

    @model_validator(mode="after")
    def _pads_to_something(self) -> Self:
        if self.pad and self.capacity is None:
            raise ValueError("pad needs a capacity")
        if self.dispatcher == "fused" and self.capacity is not None:
            raise ValueError("the fused dispatcher has no capacity")
        return self


class Balance(Section):
    """What keeps routed experts evenly busy."""

    bias: Literal["off", "sign", "proportional", "quantile"] = Field(
        default="off", description="how selection biases are moved after a step, where routers have them"
    )
    bias_rate: float = Field(default=0.001, gt=0, description="by how much; 1 is all of the way with quantile")
    auxiliary_loss: float = Field(default=0.0, ge=0, description="times the loss of uneven batches")
    sequence_loss: float = Field(default=0.0, ge=0, description="times the loss of uneven documents")
    z_loss: float = Field(default=0.0, ge=0, description="times the loss of large router logits")
    duplicates: int = Field(default=0, ge=0, description="busiest experts of a layer that get a copy on another rank")


class Memory(Section):
    """What is computed again instead of being kept."""

    recompute: bool = Field(default=True, description="keep only the input of each layer for the backward pass")
    loss_chunk: int | None = Field(default=2048, ge=1, description="tokens whose logits exist at a time; null for all")


class Checkpoint(Section):
    """What a run leaves behind to continue from."""

    every: int = Field(default=50, ge=1, description="steps between checkpoints; the last step always has one")
    keep: int = Field(default=2, ge=1, description="newest checkpoints to keep")
    keep_best: int = Field(default=0, ge=0, description="and those with the lowest held-out loss; needs --eval-data")
    asynchronous: bool = Field(default=True, description="train on while a copy in host memory is written")


class Evaluation(Section):
    """Loss on the held-out data, with --eval-data."""

    every: int = Field(
        default=50, ge=1, description="steps between evaluations; before the first and after the last, always"
    )


class Log(Section):
    """Besides metrics.jsonl, which is always written."""

    tensorboard: bool = Field(default=True, description="write TensorBoard files, if the package is installed")


class TrainConfig(Section):
    """Everything that a run can be told, with its defaults."""

    train: Train = Train()
    data: Data = Data()
    optimizer: Optimizer = Optimizer()
    lora: Lora = Lora()
    parallel: Parallel = Parallel()
    experts: Experts = Experts()
    balance: Balance = Balance()
    memory: Memory = Memory()
    checkpoint: Checkpoint = Checkpoint()
    eval: Evaluation = Evaluation()
    log: Log = Log()


def load_config(base: Path | dict[str, Any] | None, overrides: Iterable[str] = ()) -> TrainConfig:
    """The settings of a YAML file (or a tree, or None: the defaults), then `overrides`, each "section.key=value".

    Raises InputError for a file that is not YAML, an unknown key (naming the nearest known one) or a bad value.
    """
    tree: dict[str, Any] = {}
    source: dict[str, str] = {}
    if base is not None:
        tree = _read(base) if isinstance(base, Path) else base
        for key, _ in _leaves(tree):
            source[key] = f"{base}: {key}" if isinstance(base, Path) else key
            _check_key(key, source[key])
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()
        if not equals:
            raise InputError(f"--set {override}", found="no value", expected="section.key=value")
        source[key] = f"--set {key}"
        _check_key(key, source[key])
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError:
            raise InputError(source[key], found=text, expected="a YAML value") from None
        *owners, name = key.split(".")
        place = tree
        for owner in owners:
            place = place.setdefault(owner, {})
        place[name] = value
    try:
        return TrainConfig.model_validate(tree)
    except ValidationError as error:
        first, *others = error.errors()
        key = ".".join(str(part) for part in first["loc"][:2])
        said = [first["msg"], *(other["msg"] for other in others if other["loc"][:2] == first["loc"][:2])]
        plain = (message.removeprefix("Value error, ").removeprefix("Input should be ") for message in said)
        expected = ", or ".join(dict.fromkeys(plain))
        where = source.get(key, next((text for name, text in source.items() if name.startswith(f"{key}.")), key))
        found = str(first["input"]) if "." in key else ""
        raise InputError(where, found=found, expected=expected) from None


def fixed(size: int | Literal["auto"]) -> int | None:
    """A size that is chosen, None for one that the plan chooses."""
    return None if size == "auto" else size


def render_yaml(config: TrainConfig) -> str:
    """The settings as YAML, each with what it means. `load_config` reads it back unchanged."""
    lines = ["# Settings of `runtime train`. Override any of them with --set section.key=value."]
    for section, values in config:
        lines += ["", f"# {type(values).__doc__}", f"{section}:"]
        plain, told = values.model_dump(mode="json"), values.model_dump(mode="json", exclude_defaults=True)
        for name, field in type(values).model_fields.items():
            value = plain[name] if not isinstance(plain[name], dict) else told.get(name, {})
            value = yaml.safe_dump(value, default_flow_style=True, width=1000)
            text = value.removesuffix("\n").removesuffix("\n...")
            lines.append(f"  {name}: {text}".ljust(28) + f"  # {field.description}")
    return "\n".join(lines) + "\n"


def known_keys() -> list[str]:
    """Every setting as section.key."""
    sections = {name: type(values) for name, values in TrainConfig()}
    return [f"{section}.{name}" for section, kind in sections.items() for name in kind.model_fields]


def _read(file: Path) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(file.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(str(file), found=" ".join(str(error).split()), expected="YAML") from None
    if not isinstance(tree, dict | None) or not all(isinstance(section, dict) for section in (tree or {}).values()):
        raise InputError(str(file), found="not sections of settings", expected="lines such as train: {steps: 100}")
    return tree or {}


def _leaves(tree: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for section, values in tree.items():
        yield from ((f"{section}.{name}", value) for name, value in values.items())


def _check_key(key: str, where: str) -> None:
    known = known_keys()
    if key not in known and not key.startswith("optimizer.groups."):
        names = {name.partition(".")[2]: name for name in known}
        near = difflib.get_close_matches(key, known, 1, 0.5)
        near = near or [names[name] for name in difflib.get_close_matches(key.rpartition(".")[2], list(names), 1)]
        hint = f"Did you mean {near[0]}?" if near else f"There are {', '.join(known)}."
        raise InputError(where, found="unknown setting", expected="a known one", hint=hint)
