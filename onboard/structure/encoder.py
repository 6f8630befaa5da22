"""The encoder of a reference whose decoder looks at one: found like the decoder, by what flows between its parts."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.oracle.calls import Call, Undiscovered, floats, tensors
from dayzero.onboard.structure.sums import solve

ENCODER = "encoder."  # before the names of our encoder's parameters


def by_stack(named: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """What is named by parameters of our model, apart: all but the layers of the encoder, and these, named as the
    decoder's are."""
    prefix = f"{ENCODER}layers."
    inside = {name.removeprefix(ENCODER): held for name, held in named.items() if name.startswith(prefix)}
    return {name: held for name, held in named.items() if not name.startswith(prefix)}, inside


@dataclass
class EncoderParts:
    """Paths of the parts. embed_scale: what multiplies the rows of its embedding table. positions: what is added to
    them, None for nothing. layers: path of the list, of `count` members."""

    embed: str
    embed_scale: float
    positions: str | None
    layers: str
    count: int
    norm: str


def outside(calls: Mapping[str, Call], encoder: str | None) -> dict[str, Call]:
    """The calls that are not the encoder's."""
    return {path: call for path, call in calls.items() if encoder is None or not f"{path}.".startswith(f"{encoder}.")}


def added_positions(calls: Mapping[str, Call], rows: Tensor, first: Tensor, ids: Tensor) -> str | None:
    """The module that is fed the ids and whose output is added to the rows of the embedding, None for none."""
    for path, call in calls.items():
        fed = any(held.shape == ids.shape and torch.equal(held, ids) for held in tensors((call.args, call.kwargs)))
        made = floats(call.output)
        if not fed or isinstance(call.module, nn.Embedding) or len(made) != 1 or made[0].shape != first.shape:
            continue
        if set(solve(first, {"rows": rows, "positions": made[0]})) == {"rows", "positions"}:
            return path
    return None


def encoder_parts(
    calls: Mapping[str, Call], encoder: str, embed: str, layers: str, norm: str, ids: Tensor
) -> EncoderParts:
    """The encoder at this path, whose embedding, list of layers and last norm are known. Raises Undiscovered."""
    own = {path: call for path, call in calls.items() if path.startswith(f"{encoder}.")}
    count = sum(path.rpartition(".")[0] == layers for path in own)
    first = own[f"{layers}.0"].hidden
    rows = nn.functional.embedding(ids, own[embed].module.weight).detach()  # type: ignore[arg-type]
    positions = added_positions(own, rows, first, ids)
    values = {"rows": rows} | ({"positions": own[positions].result} if positions else {})
    terms = solve(first, values)
    if "rows" not in terms or terms.get("positions", 1.0) != 1.0:
        raise Undiscovered(f"the first layer of {encoder} is not fed the rows of {embed}")
    return EncoderParts(embed, terms["rows"], positions, layers, count, norm)
