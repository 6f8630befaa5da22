"""A model as plans see it: the shapes of its parameters, by unit of FSDP2, and the mesh that cuts them.

One layer of each kind is built on the meta device, without a number in it. Units are those of `parallel.parallelise`:
one for each layer, one for each container of experts, and a root with embedding, last norm and head.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import nn

from dayzero.runtime import config
from dayzero.runtime.activations import measure_layers
from dayzero.runtime.dry_pass import LayerBytes
from dayzero.runtime.lora import apply_lora
from dayzero.runtime.moments import Moments
from dayzero.runtime.nn import CausalLM, Experts, Routed
from dayzero.runtime.nn.expert_parallel import Dispatcher
from dayzero.runtime.nn.index_loss import freeze_indexers
from dayzero.runtime.optimizer import moments_of
from dayzero.runtime.parameter_roles import trained_parameters
from dayzero.runtime.precision import Precision
from dayzero.runtime.shared_batch import Sharing, cut_dimensions, sharing_of
from dayzero.runtime.spec import ModelSpec

Mode = Literal["lora", "full"]
WIDE = 4  # bytes of float32: what is trained, its gradient, and the dtype of reductions
GIB = 1 << 30


class Mesh(BaseModel):
    """dp_replicate * dp_shard * tp * cp = efsdp * ep = all ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dp_replicate: int
    dp_shard: int
    ep: int
    efsdp: int
    tp: int = Field(default=1, exclude_if=lambda tp: tp == 1)
    cp: int = Field(default=1, exclude_if=lambda cp: cp == 1)

    @property
    def devices(self) -> int:
        return self.dp_replicate * self.dp_shard * self.tp * self.cp

    def __str__(self) -> str:
        replicas = f"{self.dp_replicate} x " if self.dp_replicate > 1 else ""
        shared = "".join(f", {name} {size}" for name, size in (("tp", self.tp), ("cp", self.cp)) if size > 1)
        return f"{replicas}dp_shard {self.dp_shard}{shared}, ep {self.ep} x efsdp {self.efsdp}"


@dataclass(frozen=True)
class Parameter:
    """bytes: of an element, as the rank keeps it. moments: how many the optimizer has of it. cut: the dimension that tp
    cuts, None for none."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    bytes: int
    moments: int = 0
    cut: int | None = None

    def shape_on(self, tp: int) -> tuple[int, ...]:
        """Of the part that one of the ranks of tp computes with."""
        return self.shape if self.cut is None else _first(self.shape, tp, self.cut)


@dataclass(frozen=True)
class Unit:
    """What is gathered and freed together. experts: whether it holds the experts of a layer. buffers: bytes of what
    every rank holds whole, such as a router's selection bias."""

    name: str
    parameters: tuple[Parameter, ...]
    experts: bool = False
    buffers: int = 0

    def elements(self, mesh: Mesh, trained_only: bool = False) -> int:
        """Of the whole unit on this rank, once gathered."""
        share = mesh.ep if self.experts else 1
        held = (p for p in self.parameters if p.trained or not trained_only)
        return sum(math.prod(p.shape_on(mesh.tp)) // share for p in held)

    def local(self, mesh: Mesh) -> list[tuple[Parameter, tuple[int, ...]]]:
        """(parameter, shape of the part that rank 0 keeps)."""
        if not self.experts:
            others = mesh.dp_shard * mesh.cp
            return [
                (p, _first(p.shape_on(mesh.tp), others if p.cut is not None else others * mesh.tp))
                for p in self.parameters
            ]
        shapes = [(p.shape[0] // mesh.ep, *p.shape[1:]) for p in self.parameters]
        even = all(shape[0] % mesh.efsdp == 0 for shape in shapes)
        sliceable = all(len(shape) > 1 and shape[1] % mesh.efsdp == 0 for shape in shapes)
        dim = 1 if not even and sliceable else 0
        return [(p, _first(shape, mesh.efsdp, dim)) for p, shape in zip(self.parameters, shapes, strict=True)]


def _first(shape: tuple[int, ...], ranks: int, dim: int = 0) -> tuple[int, ...]:
    """The first of `ranks` shards along a dimension."""
    return (*shape[:dim], -(-shape[dim] // ranks), *shape[dim + 1 :])


@dataclass(frozen=True)
class Kind:
    """A kind of layer. moes: its routed parts. sharing: of the ranks that share a batch."""

    dense: Unit
    experts: tuple[Unit, ...]
    moes: tuple[Routed, ...]
    sharing: Sharing


@dataclass(frozen=True)
class Model:
    """order: the kinds of layers as they run, of those of a loop each time; held: of each layer once. root: embedding,
    last norm and head. built: a layer of each kind, on the meta device, in the dtype of the pass. saves_copy: whether a
    copy of the state is written while training goes on. dispatcher: how tokens get to experts on other ranks."""

    kinds: tuple[Kind, ...]
    order: tuple[int, ...]
    held: tuple[int, ...]
    root: Unit
    hidden: int
    vocabulary: int
    head_trained: bool
    compute: int  # bytes of an element in the forward and backward pass
    lora_targets: tuple[str, ...]
    built: CausalLM
    moments: Moments
    saves_copy: bool
    dispatcher: Dispatcher = "alltoall"

    @property
    def handed(self) -> int:
        """Elements a token of what the model hands to its layers one by one."""
        inputs = self.built.layer_inputs
        return 0 if inputs is None else inputs.projection.out_features  # type: ignore[union-attr, return-value]

    @cached_property
    def _measured(self) -> dict[int, list[LayerBytes]]:
        return {}

    def layer_bytes(self, tokens: int) -> list[LayerBytes]:
        """Of each kind of layer. Of fewer tokens than were asked for before: their part of those, which is no less."""
        known = self._measured
        if tokens not in known:
            more = min((seen for seen in known if seen > tokens), default=None)
            if more is None:
                known[tokens] = measure_layers(self.built, tokens)
            else:
                known[tokens] = [
                    LayerBytes(**{name: -(-value * tokens // more) for name, value in vars(layer).items()})
                    for layer in known[more]
                ]
        return known[tokens]

    @cached_property
    def units(self) -> list[tuple[Unit, int]]:
        """(unit, how many there are)."""
        return self.units_in(self.held)

    def units_in(self, kinds: tuple[int, ...]) -> list[tuple[Unit, int]]:
        """(unit, how often it occurs) of layers of these kinds and of what is around them."""
        layers = [
            (unit, count)
            for kind, count in sorted(Counter(kinds).items())
            for unit in (self.kinds[kind].dense, *self.kinds[kind].experts)
        ]
        return [*layers, (self.root, 1)]


def measure(
    spec: ModelSpec,
    mode: Mode,
    precision: Precision,
    lora_rank: int,
    optimizer: config.Optimizer | None = None,
    asynchronous: bool = True,
    train_indexers: bool = False,
    tp: int = 1,
    dispatcher: Dispatcher = "alltoall",
) -> Model:
    """The shapes of the model that a run trains. Takes no memory to speak of, and time only for the kinds of layers.
    asynchronous: checkpoints are written from a copy. train_indexers: their own loss does. tp: ranks that cut it.
    dispatcher: as in train.yaml.

    Trained parameters are float32, as `precision.keep_parameters` makes them; frozen ones keep the commonest dtype of
    the checkpoint in a bf16 run. Raises InputError for a model without anything to adapt, or that tp cannot cut.
    """
    small, used = spec.one_of_each_kind()
    with torch.device("meta"):
        model = small.build()
        targets = apply_lora(model, lora_rank, 1.0) if mode == "lora" else []
    if not train_indexers:
        freeze_indexers(model)
    frozen = 2 if precision == "bf16" and _is_narrow(spec) else WIDE
    optimizer = optimizer or config.Optimizer()
    cut = cut_dimensions(model, tp)
    moments = {id(one.parameter): moments_of(one.role, optimizer) for one in trained_parameters(model)}

    def unit(name: str, module: nn.Module, without: Sequence[nn.Module], experts: bool = False) -> Unit:
        elsewhere = {id(p) for other in without for p in other.parameters()}
        own = {name: p for name, p in module.named_parameters() if id(p) not in elsewhere}
        made = (
            Parameter(
                n,
                tuple(p.shape),
                p.requires_grad,
                WIDE if p.requires_grad else frozen,
                moments.get(id(p), 0),
                cut.get(id(p)),
            )
            for n, p in own.items()
        )
        inside = {id(b) for other in without for b in other.buffers()}
        buffers = sum(b.nbytes for b in module.buffers() if id(b) not in inside)
        return Unit(name, tuple(made), experts, buffers)

    kinds = []
    for kind, layer in zip(used, model.all_layers, strict=True):
        containers = [(name, module) for name, module in layer.named_modules() if isinstance(module, Experts)]
        inner = tuple(unit(f"layers of kind {kind}: {name}", module, [], True) for name, module in containers)
        moes = tuple(module for module in layer.modules() if isinstance(module, Routed))
        dense = unit(f"layers of kind {kind}", layer, [module for _, module in containers])
        kinds.append(Kind(dense, inner, moes, sharing_of(layer, tp)))
    head = model.embed if model.head is None else model.head
    root = unit("root: embedding, last norm, head", model, model.all_layers)
    if precision == "bf16":
        for parameter in model.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
    return Model(
        tuple(kinds),
        tuple(used.index(kind) for kind in spec.used_kinds),
        tuple(used.index(kind) for kind in spec.held_kinds),
        root,
        spec.hidden,
        spec.vocabulary,
        head.weight.requires_grad,
        2 if precision == "bf16" else WIDE,
        _short(model, targets),
        model,
        Moments(optimizer.states, optimizer.offload),
        asynchronous,
        dispatcher,
    )


def cut_by(model: Model, tp: int) -> Model:
    """The same model over other ranks of tp, without another pass. Raises InputError if it cannot be cut so."""
    cut = cut_dimensions(model.built, tp)

    def again(unit: Unit, module: nn.Module) -> Unit:
        parameters = (replace(p, cut=cut.get(id(module.get_parameter(p.name)))) for p in unit.parameters)
        return replace(unit, parameters=tuple(parameters))

    kinds = tuple(
        replace(kind, dense=again(kind.dense, layer), sharing=sharing_of(layer, tp))
        for kind, layer in zip(model.kinds, model.built.all_layers, strict=True)
    )
    made = replace(model, kinds=kinds, root=again(model.root, model.built))
    made.__dict__["_measured"] = model._measured
    return made


def _is_narrow(spec: ModelSpec) -> bool:
    """Whether most tensors are of 16 bits. Quantised ones become bf16."""
    dtypes = spec.checkpoint.dtypes
    return not dtypes or max(dtypes, key=lambda name: dtypes[name]) not in ("F32", "F64")


def _short(model: CausalLM, targets: list[str]) -> tuple[str, ...]:
    """Adapted modules without their layer: mixer.query."""
    return tuple(dict.fromkeys(name.split(".", 2)[2] if name.startswith("layers.") else name for name in targets))
