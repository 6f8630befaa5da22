"""Layers between several residual streams: each of their blocks reads a mixture of them and is added to all.

The reference's layer takes and gives [B, S, n, H], or the streams side by side, [B, S, n H]. Inside, a connection makes
what the block reads and the weights with which its output returns; a norm and the block follow, or the block alone. The
update of the streams is checked value by value. What a module makes of the streams may also be added to them as it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dayzero.onboard.oracle.calls import Call, Undiscovered, floats, join, same
from dayzero.onboard.structure.token_mixing import mixes_tokens

_EXACT = 1e-9


@dataclass
class Connected:
    """Paths, relative to the layer, of a connection, the norm after it, and the block. name: "mixer" or "ffn", or
    "addition" of a block without a connection."""

    name: str
    connection: str | None
    norm: str | None
    block: str


@dataclass
class StreamsCall(Call):
    """A call on `count` streams that stand side by side: [B, S, n H]. What it hands on unchanged is not its result."""

    count: int = 1

    def split(self, hidden: Tensor) -> list[Tensor]:
        return [hidden.flatten(0, 1).unflatten(-1, (self.count, -1))]

    def _result(self, output: Any) -> Tensor:
        made = [held for held in floats(output) if held.shape != self.hidden.shape]
        return join(made, 2) if self.joined else made[0]


def has_streams(call: Call, count: int) -> bool:
    """Whether the layer passes on more than one stream."""
    return count > 1 and call.hidden.shape == call.result.shape


def as_streams(call: Call, count: int) -> Call:
    """The call as our blocks see it, whose streams have a dimension of their own; all that it makes is its result."""
    held = {name: getattr(call, name) for name in ("path", "module", "args", "kwargs", "output")}
    if call.hidden.ndim == 4:
        return Call(**held, joined=True)
    return StreamsCall(**held, joined=True, count=count)


def stream_layer(calls: Mapping[str, Call], layer: str, count: int) -> list[Connected]:
    """The blocks of the layer in order. Raises Undiscovered."""
    end, found = calls[layer].result, []
    streams = calls[layer].hidden
    children = {
        path.removeprefix(layer + "."): call
        for path, call in calls.items()
        if path.rpartition(".")[0] == layer and call.has_stream
    }
    names: list[str] = []
    while not same(streams, end):
        reader = _next(children, streams, names)
        names.append(reader)
        result = children[reader].result
        if result.shape == streams.shape:
            streams = _known(streams + result, end, children, layer)
            found.append(Connected("addition", None, None, reader))
            continue
        apart = streams if streams.ndim == 4 else streams.unflatten(-1, (count, -1))
        outputs = floats(children[reader].output)
        read = next((out for out in outputs if out.shape == (*apart.shape[:2], apart.shape[-1])), None)
        post = next((out for out in outputs if out.shape == apart.shape[:3]), None)
        mix = next((out for out in outputs if out.shape == (*apart.shape[:3], apart.shape[2])), None)
        if read is None or post is None:
            raise Undiscovered(f"{layer}.{reader}: gives no input for a block, or no weights for its way back")
        norm: str | None = _next(children, read, names)
        try:
            block = _next(children, children[norm].result, [*names, norm])
        except Undiscovered:
            norm, block = None, norm
        names += [name for name in (norm, block) if name is not None]
        out = children[block].result
        kept = mix.transpose(-1, -2) @ apart if mix is not None else apart
        updated = post[..., None] * out[..., None, :] + kept
        streams = _known(updated.reshape(streams.shape), end, children, layer)
        role = "mixer" if mixes_tokens(children[block]) else "ffn"
        found.append(Connected(role, reader, norm, block))
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
