"""Bytes that a training step needs on a rank, and bytes that it receives, from shapes alone.

One layer of each kind is built on the meta device; the formulas stand in the docstrings of `state_memory`,
`batch_memory` and `communication`. Written for FSDP2 as `parallel.parallelise` applies it: a unit per layer and per
container of experts, and a root unit with embedding, last norm and head. All sizes are those of rank 0, which never
holds less than another.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn

from dayzero.runtime.activations import kept_bytes, largest_block, routed_bytes
from dayzero.runtime.lora import apply_lora
from dayzero.runtime.nn import CausalLM, Experts, MixtureOfExperts
from dayzero.runtime.precision import Precision
from dayzero.runtime.spec import ModelSpec

Mode = Literal["lora", "full"]
WIDE = 4  # bytes of float32: what is trained, its gradient, its two moments, and the dtype of reductions
GIB = 1 << 30


class Mesh(BaseModel):
    """dp_replicate * dp_shard = efsdp * ep = all ranks."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dp_replicate: int
    dp_shard: int
    ep: int
    efsdp: int

    @property
    def devices(self) -> int:
        return self.dp_replicate * self.dp_shard

    def __str__(self) -> str:
        replicas = f"{self.dp_replicate} x " if self.dp_replicate > 1 else ""
        return f"{replicas}dp_shard {self.dp_shard}, ep {self.ep} x efsdp {self.efsdp}"


@dataclass(frozen=True)
class Parameter:
    """bytes: of an element, as the rank keeps it."""

    name: str
    shape: tuple[int, ...]
    trained: bool
    bytes: int


@dataclass(frozen=True)
class Unit:
    """What is gathered and freed together. experts: whether it holds the experts of a layer."""

    name: str
    parameters: tuple[Parameter, ...]
    experts: bool = False

    def elements(self, mesh: Mesh, trained_only: bool = False) -> int:
        """Of the whole unit on this rank, once gathered."""
        share = mesh.ep if self.experts else 1
        return sum(math.prod(p.shape) // share for p in self.parameters if p.trained or not trained_only)

    def local(self, mesh: Mesh) -> list[tuple[Parameter, int]]:
        """(parameter, elements that rank 0 keeps)."""
        if not self.experts:
            return [(p, _rows(p.shape, mesh.dp_shard)) for p in self.parameters]
        shapes = [(p.shape[0] // mesh.ep, *p.shape[1:]) for p in self.parameters]
        even = all(shape[0] % mesh.efsdp == 0 for shape in shapes)
        sliceable = all(len(shape) > 1 and shape[1] % mesh.efsdp == 0 for shape in shapes)
        if not even and sliceable:
            shapes = [(shape[1], shape[0], *shape[2:]) for shape in shapes]
        return [(p, _rows(shape, mesh.efsdp)) for p, shape in zip(self.parameters, shapes, strict=True)]


def _rows(shape: tuple[int, ...], ranks: int) -> int:
    """Elements of the first of `ranks` shards along dimension 0."""
    return -(-shape[0] // ranks) * math.prod(shape[1:])


@dataclass(frozen=True)
class Kind:
    """A kind of layer. layer: the module itself, on the meta device. moe: its routed part, if it has one."""

    dense: Unit
    experts: tuple[Unit, ...]
    layer: nn.Module
    moe: MixtureOfExperts | None


@dataclass(frozen=True)
class Model:
    """order: the kind of every layer. root: embedding, last norm and head."""

    kinds: tuple[Kind, ...]
    order: tuple[int, ...]
    root: Unit
    hidden: int
    vocabulary: int
    head_trained: bool
    compute: int  # bytes of an element in the forward and backward pass
    lora_targets: tuple[str, ...]

    @cached_property
    def units(self) -> list[tuple[Unit, int]]:
        """(unit, how often it occurs)."""
        layers = [
            (unit, count)
            for kind, count in sorted(Counter(self.order).items())
            for unit in (self.kinds[kind].dense, *self.kinds[kind].experts)
        ]
        return [*layers, (self.root, 1)]


def measure(spec: ModelSpec, mode: Mode, precision: Precision, lora_rank: int) -> Model:
    """The shapes of the model that a run trains. Takes no memory to speak of, and time only for the kinds of layers.

    Trained parameters are float32, as `precision.keep_parameters` makes them; frozen ones keep the commonest dtype of
    the checkpoint in a bf16 run. Raises InputError for a model without anything to adapt.
    """
    used = sorted({run.kind for run in spec.layers})
    runs = [{"first": place, "count": 1, "kind": kind} for place, kind in enumerate(used)]
    small = spec.model_validate({**spec.model_dump(), "layers": runs, "rules": []})
    with torch.device("meta"):
        model = small.build()
        targets = apply_lora(model, lora_rank, 1.0) if mode == "lora" else []
    frozen = 2 if precision == "bf16" and _is_narrow(spec) else WIDE

    def unit(name: str, module: nn.Module, without: Sequence[nn.Module], experts: bool = False) -> Unit:
        elsewhere = {id(p) for other in without for p in other.parameters()}
        own = {name: p for name, p in module.named_parameters() if id(p) not in elsewhere}
        made = (
            Parameter(name, tuple(p.shape), p.requires_grad, WIDE if p.requires_grad else frozen)
            for name, p in own.items()
        )
        return Unit(name, tuple(made), experts)

    kinds = []
    for kind, layer in zip(used, model.layers, strict=True):
        containers = [(name, module) for name, module in layer.named_modules() if isinstance(module, Experts)]
        inner = tuple(unit(f"layers of kind {kind}: {name}", module, [], True) for name, module in containers)
        moe = next((module for module in layer.modules() if isinstance(module, MixtureOfExperts)), None)
        dense = unit(f"layers of kind {kind}", layer, [module for _, module in containers])
        kinds.append(Kind(dense, inner, layer, moe))
    head = model.embed if model.head is None else model.head
    return Model(
        tuple(kinds),
        tuple(used.index(run.kind) for run in spec.layers for _ in range(run.count)),
        unit("root: embedding, last norm, head", model, list(model.layers)),
        spec.hidden,
        spec.vocabulary,
        head.weight.requires_grad,
        2 if precision == "bf16" else WIDE,
        _short(model, targets),
    )


def _is_narrow(spec: ModelSpec) -> bool:
    """Whether most tensors are of 16 bits. Quantised ones become bf16."""
    dtypes = spec.checkpoint.dtypes
    return not dtypes or max(dtypes, key=lambda name: dtypes[name]) not in ("F32", "F64")


def _short(model: CausalLM, targets: list[str]) -> tuple[str, ...]:
    """Adapted modules without their layer: mixer.query."""
    return tuple(dict.fromkeys(name.split(".", 2)[2] if name.startswith("layers.") else name for name in targets))


def memory(model: Model, mesh: Mesh, tokens: int, recompute: bool, loss_chunk: int | None) -> dict[str, int]:
    """Bytes by line, at the worst moment of each: `state_memory` and `batch_memory` together."""
    return state_memory(model, mesh) | batch_memory(model, mesh.ep, tokens, recompute, loss_chunk)


def state_memory(model: Model, mesh: Mesh) -> dict[str, int]:
    """What does not depend on the batch. c: bytes of the compute dtype.

    parameters_*: elements kept * bytes of an element; dimension 0 is cut into ceil(rows / ranks).
    gradients: 4 an element of what is trained. optimizer: 8 an element and 4 a parameter (AdamW).
    gathered: c * (root + the largest of layer + its experts + the next layer, which is on its way)
        + c * the largest unit, for the buffer that the collective fills.
    reduced: of trained elements, the largest of: (c + 4) * a unit + 4 * the one reduced just before it.
    """
    lines: dict[str, int] = {f"parameters_{part}": 0 for part in ("dense", "experts", "adapters")}
    gradients = optimizer = 0
    for unit, count in model.units:
        for parameter, elements in unit.local(mesh):
            adapter = parameter.name.endswith((".lora_a", ".lora_b"))
            line = "experts" if unit.experts else "adapters" if adapter else "dense"
            lines[f"parameters_{line}"] += count * elements * parameter.bytes
            if parameter.trained:
                gradients += count * elements * WIDE
                optimizer += count * (elements * 2 * WIDE + WIDE)
    neighbours = set(zip(model.order, (*model.order[1:], model.order[-1]), strict=True))
    gathered = max(_layer(model.kinds[a], mesh) + model.kinds[b].dense.elements(mesh) for a, b in neighbours)
    largest = max(unit.elements(mesh) for unit, _ in model.units)
    return lines | {
        "gradients": gradients,
        "optimizer": optimizer,
        "gathered": model.compute * (model.root.elements(mesh) + gathered + largest),
        "reduced": _reduced(model, mesh),
    }


def batch_memory(model: Model, ep: int, tokens: int, recompute: bool, loss_chunk: int | None) -> dict[str, int]:
    """What a batch of T tokens takes on its rank.

    activations: what backward needs (`activations.kept_bytes`) of every layer; with recompute, only the input c T H
        and the routing 12 T K of every layer, and all of the largest one. In both cases gradients as large as the
        largest block's own, and 2 c T H for the last norm.
    expert_copies: token copies of the largest layer as sent, as received, and sorted (`routed_bytes`).
    logits: min(T, chunk) * V * (8 + c, or 8 if c is 4), and c V H for the gradient of a trained head in chunks.
    """
    compute, hidden = model.compute, model.hidden
    full = [kept_bytes(kind.layer, compute, tokens, ep) for kind in model.kinds]
    if recompute:
        routing = sum(12 * tokens * kind.moe.router.top_k for i in model.order if (kind := model.kinds[i]).moe)
        kept = len(model.order) * compute * tokens * hidden + routing + max(full)
    else:
        kept = sum(full[i] for i in model.order)
    block = max(largest_block(kind.layer, compute, tokens, ep) for kind in model.kinds)
    chunk = min(tokens, loss_chunk or tokens)
    logits = chunk * model.vocabulary * (8 + (compute if compute < WIDE else 0))
    if model.head_trained and chunk < tokens:
        logits += compute * model.vocabulary * hidden
    return {
        "activations": kept + block + 2 * compute * tokens * hidden,
        "expert_copies": max(routed_bytes(kind.moe, compute, tokens, ep) for kind in model.kinds),
        "logits": logits,
    }


def _layer(kind: Kind, mesh: Mesh) -> int:
    return kind.dense.elements(mesh) + sum(unit.elements(mesh) for unit in kind.experts)


def _reduced(model: Model, mesh: Mesh) -> int:
    """Units in the order of the backward pass: of each layer from the last, its experts and the layer; the root."""
    trained = [[unit.elements(mesh, trained_only=True) for unit in (*kind.experts, kind.dense)] for kind in model.kinds]
    sequence = [elements for i in reversed(model.order) for elements in trained[i]]
    sequence.append(model.root.elements(mesh, trained_only=True))
    before = [0, *sequence[:-1]]
    return max(now * (model.compute + WIDE) + last * WIDE for now, last in zip(sequence, before, strict=True))


def communication(model: Model, mesh: Mesh, tokens: int, recompute: bool, per_node: int) -> dict[str, dict[str, int]]:
    """Bytes that rank 0 receives in a step, by kind: {"all_gather": {"inside": .., "across": ..}, ..}, nodes apart.

    A collective over n ranks of which p share a node brings S (p-1)/n from inside and S (n-p)/n from other nodes. The
    ranks of ep and dp_shard are neighbours; those of efsdp stand ep apart, those of dp_replicate dp_shard. S is for
    all_gather: c * the unit, twice (forward, backward), but once for the root, which stays gathered.
    reduce_scatter: 4 * trained elements of the unit. all_reduce: 8 * trained elements kept, with dp_replicate.
    all_to_all: c T K H for each exchange: 2 forward, 2 backward, 2 again with recompute.
    """
    gather, scatter, reduce, exchange = (_zero() for _ in range(4))
    for unit, count in model.units:
        ranks, stride = (mesh.efsdp, mesh.ep) if unit.experts else (mesh.dp_shard, 1)
        passes = 1 if unit is model.root else 2
        _add(gather, count * passes * model.compute * unit.elements(mesh), ranks, stride, per_node)
        trained = unit.elements(mesh, trained_only=True)
        _add(scatter, count * WIDE * trained, ranks, stride, per_node)
        if not unit.experts:
            local = sum(elements for p, elements in unit.local(mesh) if p.trained)
            _add(reduce, count * 2 * WIDE * local, mesh.dp_replicate, mesh.dp_shard, per_node)
    for i in model.order:
        moe = model.kinds[i].moe
        if moe is not None:
            size = model.compute * tokens * moe.router.top_k * moe.experts.hidden
            _add(exchange, (6 if recompute else 4) * size, mesh.ep, 1, per_node)
    return {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": reduce, "all_to_all": exchange}


def _zero() -> dict[str, int]:
    return {"inside": 0, "across": 0}


def _add(total: dict[str, int], size: int, ranks: int, stride: int, per_node: int) -> None:
    together = min(ranks, max(1, per_node // stride))
    total["inside"] += size * (together - 1) // ranks
    total["across"] += size * (ranks - together) // ranks
