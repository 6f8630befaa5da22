"""Layers between several residual streams: each of their blocks reads a mixture of them and is added to all.

The reference's layer takes and gives [B, S, n, H]. Inside, a connection makes what the block reads and the weights with
which its output returns; a norm and the block follow. The update of the streams is checked value by value.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from dayzero.onboard.calls import Call, Undiscovered, floats, same
from dayzero.onboard.layer_wiring import mixes_tokens

_EXACT = 1e-9


@dataclass
class Connected:
    """Paths, relative to the layer, of a connection, the norm after it, and the block. name: "mixer" or "ffn"."""

    name: str
    connection: str
    norm: str
    block: str


def has_streams(call: Call) -> bool:
    """Whether the layer passes on more than one stream."""
    return call.result.ndim == 4 and call.hidden.shape == call.result.shape


def stream_layer(calls: Mapping[str, Call], layer: str) -> list[Connected]:
    """The blocks of the layer in order. Raises Undiscovered."""
    streams, found = calls[layer].hidden, []
    children = {
        path.removeprefix(layer + "."): call
        for path, call in calls.items()
        if path.rpartition(".")[0] == layer and call.has_stream
    }
    names: list[str] = []
    while not same(streams, calls[layer].result):
        connection = _next(children, streams, names)
        outputs = floats(children[connection].output)
        read = next((out for out in outputs if out.shape == (*streams.shape[:2], streams.shape[-1])), None)
        post = next((out for out in outputs if out.shape == streams.shape[:3]), None)
        mix = next((out for out in outputs if out.shape == (*streams.shape[:3], streams.shape[2])), None)
        if read is None or post is None:
            raise Undiscovered(f"{layer}.{connection}: gives no input for a block, or no weights for its way back")
        norm = _next(children, read, names)
        block = _next(children, children[norm].result, [*names, norm])
        names += [connection, norm, block]
        out = children[block].result
        kept = mix.transpose(-1, -2) @ streams if mix is not None else streams
        streams = _known(post[..., None] * out[..., None, :] + kept, calls[layer].result, children, layer)
        role = "mixer" if mixes_tokens(children[block]) else "ffn"
        found.append(Connected(role, connection, norm, block))
    if len({item.name for item in found}) != len(found):
        raise Undiscovered(f"{layer}: {', '.join(item.name for item in found)} between streams; expected one of each")
    return found


def _next(children: Mapping[str, Call], read: Tensor, used: list[str]) -> str:
    for path, call in children.items():
        if path not in used and call.hidden.shape == read.shape and same(call.hidden, read):
            return path
    raise Undiscovered("between streams: no module reads what stands there")


def _known(value: Tensor, end: Tensor, children: Mapping[str, Call], layer: str) -> Tensor:
    """The very tensor of the reference that `value` was computed to be: rounding may differ in the last bit."""
    for seen in (end, *(call.hidden for call in children.values())):
        if seen.shape == value.shape and torch.linalg.norm(seen - value) <= _EXACT * torch.linalg.norm(value):
            return seen
    raise Undiscovered(f"{layer}: the streams are not updated by a weighted output and a mixture of themselves")
