"""What layers are handed of the inputs of layers before them: all that was kept as one stack, or single ones, such as
the embeddings, as arguments of their own."""

from collections.abc import Mapping

import torch
from torch import Tensor

from dayzero.onboard.oracle.calls import Call, same
from dayzero.onboard.structure.several import top_level
from dayzero.runtime.nn.wiring import PAST


def kept_before(calls: Mapping[str, Call], layer: str) -> Tensor | None:
    """[B, S, n, H]: what the layer is handed of the inputs of layers before it as one stack; None where it is not."""
    call = calls[layer]
    if call.hidden.ndim != 3:
        return None
    batch, length, hidden = call.hidden.shape
    for _, held in top_level(call):
        if held.ndim == 4 and held.shape[:2] == (batch, length) and held.shape[3] == hidden:
            earlier = [before.hidden for before in _members(calls, layer, before=True)]
            if all(any(equal(one, before) for before in earlier) for one in held.unbind(2)):
                return held
    return None


def handed_alone(calls: Mapping[str, Call], layer: str) -> dict[str, Tensor]:
    """Names such as "past.0" -> the argument of the layer that is the input of an earlier one."""
    call = calls[layer]
    earlier = [member.hidden for member in _members(calls, layer, before=True)]
    kept = [hidden for hidden in earlier if _is_handed_on(calls, layer, hidden)]
    found = {}
    for number, hidden in enumerate(kept):
        for held in _beside_input(call):
            if equal(held, hidden):
                found[f"{PAST}.{number}"] = held
    return found


def is_kept(calls: Mapping[str, Call], layer: str) -> bool:
    """Whether whoever reads what this layer gives finds its input among what was kept, and it was not there before."""
    mine = kept_before(calls, layer)
    if mine is None:
        return False
    given = calls[layer].result
    for path, call in calls.items():
        if path.startswith(layer + ".") or path == layer:
            continue
        arguments = top_level(call)
        if any(equal(held, given) for _, held in arguments):
            stacks = [held for _, held in arguments if held.ndim == 4 and held.shape[3] == mine.shape[3]]
            wanted = torch.cat((mine, calls[layer].hidden[:, :, None]), 2)
            return any(equal(held, wanted) for held in stacks)
    return False


def handed_on(calls: Mapping[str, Call], path: str) -> list[int]:
    """The layers of the list at `path` whose input is handed to later ones as an argument of its own."""
    members = _members(calls, f"{path}.0")
    return [index for index, call in enumerate(members) if _is_handed_on(calls, f"{path}.0", call.hidden)]


def _is_handed_on(calls: Mapping[str, Call], layer: str, hidden: Tensor) -> bool:
    """Whether a layer of the list is handed `hidden`, the input of an earlier one, beside its own input."""
    return any(
        equal(held, hidden)
        for call in _members(calls, layer)
        if not same(call.hidden, hidden)
        for held in _beside_input(call)
    )


def _beside_input(call: Call) -> list[Tensor]:
    """Arguments of the shape of the input that are not the input."""
    return [held for _, held in top_level(call) if held is not call.hidden and held.shape == call.hidden.shape]


def _members(calls: Mapping[str, Call], layer: str, before: bool = False) -> list[Call]:
    """The calls of all layers of its list, or of those before it."""
    path, _, number = layer.rpartition(".")
    if not number.isdecimal():
        return []
    found, index = [], 0
    while f"{path}.{index}" in calls and not (before and index == int(number)):
        found.append(calls[f"{path}.{index}"])
        index += 1
    return found


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, dtype and shape included."""
    return a is b or (a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b))
