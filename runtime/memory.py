"""Bytes that a training step needs on a rank, from shapes alone; `communication` has those that it receives.

The formulas stand in the docstrings of `state_memory` and `batch_memory`. Written for FSDP2 as `parallel.parallelise`
applies it. All sizes are those of rank 0, which never holds less than another.
"""

import math

from dayzero.runtime.activations import kept, working
from dayzero.runtime.planned_model import WIDE, Kind, Mesh, Model
from dayzero.runtime.shared_batch import kept_bytes
from dayzero.runtime.travelling import route_bytes, travelling_bytes


def memory(
    model: Model, mesh: Mesh, tokens: int, recompute: bool, loss_chunk: int | None, prefetch: int = 1
) -> dict[str, int]:
    """Bytes by line, at the worst moment of each: `state_memory` and `batch_memory` together."""
    return state_memory(model, mesh, prefetch) | batch_memory(
        model, mesh.ep, tokens, recompute, loss_chunk, mesh.tp, mesh.cp
    )


def state_memory(model: Model, mesh: Mesh, prefetch: int = 1) -> dict[str, int]:
    """What does not depend on the batch. c: bytes of the compute dtype.

    parameters_*: elements kept * bytes of an element; dimension 0 is cut into ceil(rows / ranks).
    buffers: what every rank holds whole.
    gradients: 4 an element of what is trained. optimizer: its moments as they are kept (AdamW has two, Muon one) and
        4 a parameter, its step; moments in host memory are in `host_memory`. What a step of the optimizer works with
        comes after activations are gone, and has no line.
    gathered: c * (root + the largest of layer + its experts + what is on its way: nothing for prefetch 0, the next
        layer for 1, and its experts for 2) + c * the largest unit, for the buffer that the collective fills.
    reduced: of trained elements, the largest of: (c + 4) * a unit + 4 * the one reduced just before it.
    """
    lines: dict[str, int] = {f"parameters_{part}": 0 for part in ("dense", "experts", "adapters")}
    gradients = optimizer = buffers = 0
    for unit, count in model.units:
        buffers += count * unit.buffers
        for parameter, shape in unit.local(mesh):
            elements = math.prod(shape)
            adapter = parameter.name.endswith((".lora_a", ".lora_b"))
            line = "experts" if unit.experts else "adapters" if adapter else "dense"
            lines[f"parameters_{line}"] += count * elements * parameter.bytes
            if parameter.trained:
                gradients += count * elements * WIDE
                held = (
                    0 if model.moments.offload else parameter.moments * model.moments.bytes(shape, parameter.shape[-1])
                )
                optimizer += count * (held + WIDE)
    neighbours = set(zip(model.order, (*model.order[1:], model.order[-1]), strict=True))
    whole = [_layer(kind, mesh) for kind in model.kinds]
    dense = [kind.dense.elements(mesh) for kind in model.kinds]
    nothing = [0] * len(whole)
    forward, backward = ((nothing, nothing), (dense, dense), (dense, whole))[prefetch]
    gathered = max(max(whole[a] + forward[b], whole[b] + backward[a]) for a, b in neighbours)
    largest = max(unit.elements(mesh) for unit, _ in model.units)
    return lines | {
        "buffers": buffers,
        "gradients": gradients,
        "optimizer": optimizer,
        "gathered": model.compute * (model.root.elements(mesh) + gathered + largest),
        "reduced": _reduced(model, mesh),
    }


def host_memory(model: Model, mesh: Mesh) -> dict[str, int]:
    """Bytes of rank 0 in host memory: moments that are kept there between steps, and the copy that an asynchronous
    checkpoint is written from, which is of all that is trained and of the optimizer's state."""
    moments = copied = 0
    for unit, count in model.units:
        for parameter, shape in unit.local(mesh):
            if parameter.trained:
                held = parameter.moments * model.moments.bytes(shape, parameter.shape[-1])
                moments += count * held
                copied += count * (math.prod(shape) * parameter.bytes + held + WIDE)
    lines = {"host_moments": moments} if model.moments.offload else {}
    return lines | ({"host_copy": copied} if model.saves_copy else {})


def batch_memory(
    model: Model, ep: int, tokens: int, recompute: bool, loss_chunk: int | None, tp: int = 1, cp: int = 1
) -> dict[str, int]:
    """What a batch of T tokens takes on its rank, or on each of the cp * tp ranks that share it. T is then T / (cp tp)
    below: blocks that run on more rows are as much narrower.

    activations: what every layer keeps for its backward pass; with recompute, its output, what it leaves for later
        layers and its selections, and all that the largest layer keeps. In both cases what the layer with the largest
        need works with beside that (`activations`), and 2 c T H for the last norm. What is handed to layers one by one,
        [T, layers, P], is kept whole, and before its norm too.
    expert_copies: rows on their way between the ranks of an exchange, of the layer with most, and what is kept of their
        routes, of every layer or with recompute of one (`travelling`).
    logits: min(T, chunk) * V * (8 + c, or 8 if c is 4), and with chunks 4 V H for the sum that is a trained head's
        gradient. V / tp of T / cp tokens where tp cuts the vocabulary.
    shared_rows: gathered inputs, keys and values (`shared_batch.kept_bytes`) of all layers, or of the largest.
    """
    shared = [kept_bytes(kind.sharing, model.compute, tokens, tp, cp) for kind in model.kinds]
    part = -(-tokens // cp)
    tokens = -(-part // tp)
    compute, hidden = model.compute, model.hidden
    layers = model.layer_bytes(tokens)
    largest = max(working(layer, ep) for layer in layers)
    if recompute:
        between = sum(layers[i].output + layers[i].routing for i in model.order)
        activations = between + max(kept(layer, ep) + working(layer, ep) for layer in layers)
    else:
        activations = sum(kept(layers[i], ep) for i in model.order) + largest
    of_head, vocabulary = (part, model.vocabulary // tp) if model.vocabulary % tp == 0 else (tokens, model.vocabulary)
    chunk = min(of_head, loss_chunk or of_head)
    logits = chunk * vocabulary * (8 + (compute if compute < WIDE else 0))
    if model.head_trained and chunk < of_head:
        logits += WIDE * vocabulary * hidden
    how = tokens, ep, model.dispatcher
    most = max((travelling_bytes(moe, compute, *how) for kind in model.kinds for moe in kind.moes), default=0)
    routes = [sum(route_bytes(moe, *how) for moe in model.kinds[i].moes) for i in model.order]
    rows = {"shared_rows": max(shared) if recompute else sum(shared[i] for i in model.order)} if tp * cp > 1 else {}
    return rows | {
        "activations": activations + 2 * compute * tokens * (hidden + model.handed),
        "expert_copies": most + (max(routes) if recompute else sum(routes)),
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
