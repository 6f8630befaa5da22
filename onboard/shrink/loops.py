"""Whether a small model tells apart what its layers are handed when they run again.

A pass hands on what it made of what it kept. Of a single state every mixture is the same, and of all messages any could
then stand for another without a rung of the ladder that noticed; a model that keeps more layers has more states.
"""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import torch

from dayzero.onboard.oracle.calls import Undiscovered, record_calls
from dayzero.onboard.oracle.reference import build, redraw
from dayzero.onboard.shrink.layers import layer_list
from dayzero.onboard.shrink.trial import SEQUENCE
from dayzero.onboard.structure.kept_inputs import equal
from dayzero.onboard.structure.loops import loop_of, message_of


def handed_alike(config: Mapping[str, Any]) -> list[int]:
    """The layers that run several times, where two of all the messages that they are handed are the same; else []."""
    model, _ = build(config)
    generator = torch.Generator().manual_seed(0)
    redraw(model, generator)
    layers = layer_list(model)
    path = next(path for path, module in model.named_modules() if module is layers)
    vocabulary = model.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
    ids = torch.randint(min(3, vocabulary - 1), vocabulary, (1, SEQUENCE), generator=generator)
    try:
        calls, _ = record_calls(model, ids)
        loop = loop_of(calls, path, len(layers))
    except Undiscovered:  # which is said where the model is proven
        return []
    if loop is None or loop.message is None:
        return []
    messages = [
        one for index in loop.layers if (made := message_of(calls, loop, index)) is not None for one in made.unbind(2)
    ]
    return list(loop.layers) if any(equal(a, b) for a, b in combinations(messages, 2)) else []
