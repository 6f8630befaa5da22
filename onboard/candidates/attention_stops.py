"""Where the solver of softmax attention stopped: which of its pieces nothing explains, and what these are made of."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dayzero.onboard.candidates.softmax import watch
from dayzero.onboard.candidates.stops import Stop, made_of


def attention_stop(solver: Any) -> Stop:
    """solver: an `AttentionSolver` that had no candidate."""
    wide = solver.linears[solver.end].hidden.shape[-1]
    explained = {
        "queries": any(True for _ in solver._roads(solver.query, positions=True)),
        "keys": any(True for _ in solver._roads(solver.key, positions=False)),
        "values": any(True for _ in solver._values()),
        "which tokens see which": solver._visibility() is not None,
        "scores": solver._scores() is not None,
        "the softmax's last column": solver._sinks() is not None,
        "what becomes of the gathered values": wide == solver.heads * solver.value_dim
        and any(True for _ in solver._outputs()),
    }
    pieces = [what for what, known in explained.items() if not known]
    if "which tokens see which" in pieces and "the softmax's last column" in pieces and "scores" in pieces:
        pieces.remove("the softmax's last column")  # it is measured against scores
    if not pieces:
        return Stop(solver.block, {"how its pieces go together": ()})
    sources = made_of(solver.site.module, lambda: _measured(solver))
    alone = {
        "scores": sources["queries"] | sources["keys"],
        "the softmax's last column": sources["queries"] | sources["keys"],
        "what becomes of the gathered values": sources["gathered"],
    }
    order = list(solver.site.module.state_dict())
    return Stop(
        solver.block,
        {what: tuple(n for n in order if n in sources.get(what, set()) - alone.get(what, set())) for what in pieces},
    )


def _measured(solver: Any) -> Mapping[str, Tensor]:
    """The pieces as the module has them now; none where it has no such softmax any more."""
    read: list[Tensor] = []
    last = solver.site.module.get_submodule(solver.end)
    handle = last.register_forward_pre_hook(lambda module, args: read.append(args[0].detach().clone()))
    try:
        seen = [held for held in watch(solver.site.call) if held.scores.shape == solver.seen.scores.shape]
    finally:
        handle.remove()
    if not seen or not read:
        return {}
    held, keys = seen[0], seen[0].key.shape[2]
    found = {
        "queries": held.query,
        "keys": held.key,
        "values": held.value,
        "gathered": held.attended,
        "which tokens see which": held.scores[..., :keys] > -1e30,
        "scores": torch.where(held.scores > -1e30, held.scores, 0.0),
        "what becomes of the gathered values": read[-1],
    }
    return found | ({"the softmax's last column": held.scores[..., keys:]} if held.scores.shape[-1] > keys else {})
