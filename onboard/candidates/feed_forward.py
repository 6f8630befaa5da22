"""Candidates for a dense gated feed-forward layer."""

import itertools
from typing import get_args

from torch import nn

from dayzero.onboard.candidates.evidence import Candidate, Site, literal, present, size
from dayzero.onboard.discover import Call, same
from dayzero.onboard.trace import Operations
from dayzero.runtime.nn.activation import Activation
from dayzero.runtime.weights import Stored


def propose_feed_forward(site: Site) -> list[Candidate]:
    """Three projections: two read the input, one makes the output. Which of the two is the gate is enumerated."""
    linears = linear_calls(site)
    down = [path for path, call in linears.items() if same(call.result, site.call.result)]
    inputs = [path for path, call in linears.items() if same(call.hidden, site.call.hidden)]
    if len(linears) != 3 or len(down) != 1 or len(inputs) != 2:
        return []
    candidates = []
    for (gate, up), act in itertools.product(itertools.permutations(inputs), activations(site.operations)):
        names = {"gate": gate, "up": up, "down": down[0]}
        biased = linears[gate].module.bias is not None
        kinds = ("weight", "bias") if biased else ("weight",)
        candidates.append(
            Candidate(
                "GatedFeedForward",
                {
                    "hidden": size(f"{gate}.weight", 1),
                    "width": size(f"{gate}.weight", 0),
                    "act": literal(act, "the trace's activation"),
                    "bias": present(f"{gate}.bias"),
                },
                {f"{ours}.{kind}": Stored(f"{theirs}.{kind}") for ours, theirs in names.items() for kind in kinds},
            )
        )
    return candidates


def linear_calls(site: Site) -> dict[str, Call]:
    """The plain projections below the module, in the order in which they ran."""
    return {path: call for path, call in site.inner.items() if isinstance(call.module, nn.Linear)}


_STEP_OF_ACTIVATION = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu", "relu": "relu", "relu2": "relu"}


def activations(operations: Operations) -> list[Activation]:
    """Activations whose step the trace shows, those first; the others after, for spellings that we do not know."""
    names = list(get_args(Activation))
    return sorted(names, key=lambda name: _STEP_OF_ACTIVATION[name] not in operations.steps)
