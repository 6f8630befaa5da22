"""A model whose second and third layer share an attention, with additions of their own, that reads the embeddings too;
and what ranks make of it."""

import torch
from exactness import batches, relative_error, whole

from dayzero.runtime.mesh import Layout, batch_of_rank, make_meshes
from dayzero.runtime.nn import (
    Adapted,
    CausalLM,
    DecoderLayer,
    GroupedQueryAttention,
    Mamba,
    Projection,
    RMSNorm,
    SideBySide,
)
from dayzero.runtime.nn.causal_lm import initialise
from dayzero.runtime.parallel import parallelise
from dayzero.runtime.recompute import recompute

HIDDEN, VOCABULARY = 8, 34


def build() -> CausalLM:
    """In float64, weights drawn."""
    attention = GroupedQueryAttention(2 * HIDDEN, 4, 2, 6, 0.4, rotary=None, out=HIDDEN)
    shared = {
        "mixer_norm": RMSNorm(2 * HIDDEN, 1e-5),
        "mixer": Adapted(attention, [["query"], ["key"], ["value"]], rank=3, uses=2),
    }
    layers = [DecoderLayer({"mixer": Mamba(HIDDEN, 12, 3, 2, 4)}, {"mixer": "x"}, "x + mixer", keeps="x")]
    layers += [hybrid(shared, use) for use in (0, 1)]
    model = CausalLM(VOCABULARY, HIDDEN, layers, RMSNorm(HIDDEN, 1e-5), history=True, shared=[shared])
    initialise(model, 0.3, 0)
    return model.double()


def hybrid(shared: dict[str, torch.nn.Module], use: int) -> DecoderLayer:
    own = {
        "mixer_input": SideBySide(),
        "projection": Projection(HIDDEN, HIDDEN),
        "mixer_2": Mamba(HIDDEN, 12, 3, 2, 4),
    }
    reads = {
        "mixer_input": "x, past.0",
        "mixer_norm": "mixer_input",
        "mixer": "mixer_norm",
        "projection": "mixer",
        "mixer_2": "x + projection",
    }
    return DecoderLayer(own, reads, "x + mixer_2", shared=shared, use=use)


def gradient_errors(layouts: list[tuple[int, ...]]) -> list[dict[str, float]]:
    """For each layout, with and without recomputing, relative errors of gradients against one process."""
    return [_errors(Layout(*layout), recomputed) for layout in layouts for recomputed in (False, True)]


def _errors(layout: Layout, recomputed: bool) -> dict[str, float]:
    reference, model = build(), build()
    if recomputed:
        for layer in model.layers:
            recompute(layer)
    parallelise(model, make_meshes(layout, "cpu"))
    every = [list(batches(VOCABULARY, rank, 2)) for rank in range(layout.batches)]
    for ids, labels, bounds in [batch for part in every for batch in part]:
        reference(ids, bounds, labels).backward()
    for ids, labels, bounds in every[batch_of_rank(layout)]:
        model(ids, bounds, labels).backward()
    theirs = dict(reference.named_parameters())
    assert theirs.keys() == dict(model.named_parameters()).keys()
    return {name: relative_error(whole(held.grad), theirs[name].grad) for name, held in model.named_parameters()}
