"""What a layer is handed that earlier layers made: a selection of keys, latents, in the form our blocks share them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dayzero.onboard.oracle.calls import Call, same
from dayzero.onboard.oracle.reference import Promote
from dayzero.runtime.nn.attention import KEYS, VALUES
from dayzero.runtime.nn.carried_router import STATE
from dayzero.runtime.nn.distance_bias import BIAS
from dayzero.runtime.nn.handed_routing import INDEX, WEIGHTS
from dayzero.runtime.nn.latent_attention import LATENTS, SELECTED
from dayzero.runtime.nn.layer_inputs import LAYER_INPUT


def left_by_earlier(call: Call) -> dict[str, Tensor]:
    """`Context.shared` as the captured call saw it."""
    shared: dict[str, Tensor] = {}
    if (index := handed_index(call)) is not None:
        shared[SELECTED] = index
    for name, pair in handed_heads(call).items():
        shared |= as_shared(name, pair)
    if (state := handed_state(call)) is not None:
        shared[STATE] = shared[LAYER_INPUT] = state
    if (routing := handed_routing(call)) is not None:
        shared[INDEX], shared[WEIGHTS] = routing
    if (bias := handed_bias(call)) is not None:
        shared[BIAS] = bias
    return shared


def handed_bias(call: Call) -> Tensor | None:
    """[2 S - 1, N], from a floating-point argument [1 or B, N, S, S] that depends on the distance alone and is no mask:
    the biases of keys S - 1 places later to S - 1 places earlier than their query; None without one."""
    if call.hidden.ndim != 3:
        return None
    batch, length = call.hidden.shape[:2]
    for value in [*call.args, *call.kwargs.values()]:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value.ndim != 4:
            continue
        if value.shape[0] not in {1, batch} or value.shape[2:] != (length, length):
            continue
        plain = bool((value.detach().abs() < 1e30).all()) and bool(value.any())
        if not plain or not torch.equal(value, value[:1].expand_as(value)):
            continue
        if torch.equal(value[..., 1:, 1:], value[..., :-1, :-1]):
            later, earlier = value[0, :, 0].flip(-1), value[0, :, 1:, 0]
            return torch.cat((later, earlier), -1).detach().t()
    return None


def handed_routing(call: Call) -> tuple[Tensor, Tensor] | None:
    """([T, K] int64, [T, K]): names of experts and their weights among the arguments; None without them."""
    tokens = call.hidden[..., 0].numel()
    found = [value for value in [*call.args, *call.kwargs.values()] if isinstance(value, Tensor)]
    named = [value for value in found if value.dtype == torch.int64 and value.ndim > 1]
    for index in named:
        for weights in found:
            alike = weights.is_floating_point() and weights.shape == index.shape and weights is not call.hidden
            if alike and index.numel() % tokens == 0 and index.shape[-1] * tokens == index.numel():
                return index.reshape(tokens, -1), weights.detach().reshape(tokens, -1)
    return None


def handed_state(call: Call) -> Tensor | None:
    """[T, width], from a floating-point argument [B, S, width] beside the stream, narrower than it; or None."""
    if call.hidden.ndim != 3:
        return None
    batch, length, hidden = call.hidden.shape
    for value in [*call.args, *call.kwargs.values()]:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value is call.hidden or value.ndim != 3:
            continue
        if value.shape[:2] == (batch, length) and 1 < value.shape[2] < hidden:
            return value.detach().flatten(0, 1)
    return None


def handed_index(call: Call) -> Tensor | None:
    """[T, 1, K] int64, from an integer argument [B, S, K] with places of tokens; None without one."""
    if call.hidden.ndim not in {3, 4}:  # one stream or several
        return None
    batch, length = call.hidden.shape[:2]
    for value in [*call.args, *call.kwargs.values()]:
        if not isinstance(value, Tensor) or value.is_floating_point() or value.dtype == torch.bool:
            continue
        if value.ndim == 3 and value.shape[:2] == (batch, length):
            return value.to(torch.int64).reshape(batch * length, 1, -1)
    return None


def handed_latents(call: Call, after: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs [B, 1, S, R] by name, in a mapping among the arguments. after: as the call left it."""
    return {name: pair for name, pair in handed_heads(call, after).items() if pair[0].shape[1] == 1}


def handed_heads(call: Call, after: bool = False) -> dict[str, tuple[Tensor, Tensor]]:
    """Keys and values [B, G, S, D] by name, in a mapping among the arguments. after: as the call left it."""
    if call.hidden.ndim != 3:
        return {}
    batch, length = call.hidden.shape[:2]
    found = {}
    for value in [*call.args, *call.kwargs.values()]:
        if not isinstance(value, Mapping):
            continue
        held = value
        if after:
            held = dict(value)
            args, kwargs = call.arguments(lambda other, value=value, held=held: held if other is value else other)
            with torch.no_grad(), Promote():
                call.module(*args, **kwargs)
        for name, pair in held.items():
            if not isinstance(pair, (tuple, list)) or len(pair) != 2:
                continue
            if not all(isinstance(p, Tensor) and p.is_floating_point() and p.ndim == 4 for p in pair):
                continue
            if all(p.shape[0] == batch and p.shape[2] == length for p in pair) and pair[0].shape[1] == pair[1].shape[1]:
                found[str(name)] = (pair[0].detach(), pair[1].detach())
    return found


def left_behind(call: Call) -> dict[str, tuple[Tensor, Tensor]]:
    """The pairs [B, G, S, D] that the call writes into a mapping among its arguments, by name."""
    before, after = handed_heads(call), handed_heads(call, after=True)
    return {name: pair for name, pair in after.items() if name not in before or not same(pair[0], before[name][0])}


def as_shared(name: str, pair: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    """A pair [B, G, S, D] under the names of `Context.shared`: keys and values, and latents where it has one head."""
    keys, values = (part.transpose(1, 2).flatten(0, 1) for part in pair)
    latents = {LATENTS + name: torch.cat((keys[:, 0], values[:, 0]), -1)} if keys.shape[1] == 1 else {}
    return {KEYS + name: keys, VALUES + name: values, **latents}


def left_with_first_token_moved(call: Call) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments of the call with one token changed of what earlier layers left in a mapping, [B, heads, S, R] each;
    None where nothing was left."""
    if call.hidden.ndim != 3:
        return None
    batch, length = call.hidden.shape[:2]
    found = False

    def moved(value: Any) -> Any:
        nonlocal found
        if isinstance(value, Mapping):
            return {name: moved(held) for name, held in value.items()}
        if isinstance(value, (tuple, list)):
            return type(value)(moved(held) for held in value)
        is_left = isinstance(value, Tensor) and value.ndim == 4 and value.shape[::2] == (batch, length)
        if not is_left or not value.is_floating_point():
            return value
        found = True
        changed = value.clone()
        changed[:, :, 0] += 1.0
        return changed

    arguments = call.arguments(lambda value: moved(value) if isinstance(value, Mapping) else value)
    return arguments if found else None
