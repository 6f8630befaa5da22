"""What goes into the softmax of an attention module and what comes out of it, as the module ran.

A dispatch mode sees the products around every softmax over keys, so that what makes queries and keys, what makes
values, and what becomes of their weighted sums can each be solved by themselves.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dayzero.onboard.oracle.calls import Call


@dataclass
class SoftmaxSeen:
    """query: [B, N, S, D]; key: [B, N, U, D]; value: [B, N, U, Dv]; attended: [B, N, S, Dv]. scores: [B, N, S, U], or
    U + 1 with a sink, what the softmax was given, masked. multiplied_by_one: what was multiplied by a scalar 1.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    attended: Tensor
    scores: Tensor
    multiplied_by_one: list[Tensor] = field(default_factory=list, repr=False)

    @property
    def products(self) -> Tensor:
        return self.query @ self.key.transpose(-1, -2)


class _Watch(TorchDispatchMode):
    """Keeps copies of the batched products and of the softmaxes between them, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, tuple[Tensor, ...]]] = []
        self.ones: list[Tensor] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = func.overloadpacket.__name__
        output = func(*args, **kwargs)
        if name == "bmm":
            self.events.append(("product", tuple(part.clone() for part in (args[0], args[1], output))))
        elif name == "_softmax" and args[0].ndim >= 3:
            self.events.append(("softmax", (args[0].clone(),)))
        elif name.startswith("_scaled_dot_product") and "backward" not in name:
            self.events.append(("fused", _fused(args, kwargs, output[0])))
        elif name in {"mul", "mul_"} and any(type(arg) in {int, float} and arg == 1 for arg in args[1:2]):
            self.ones.append(output.clone())
        return output


def _fused(args: Any, kwargs: Any, output: Tensor) -> tuple[Tensor, ...]:
    """Query, key, value, result and scores of one fused call."""
    query, key, value = (part.clone() for part in args[:3])
    causal = any(arg is True for arg in args[3:]) or bool(kwargs.get("is_causal"))
    key, value = (part.repeat_interleave(query.shape[1] // part.shape[1], 1) for part in (key, value))
    scale = kwargs.get("scale")
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scale is None else scale)
    mask = kwargs.get("attn_mask")
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else scores + mask
    return query, key, value, output.clone(), scores


def watch(call: Call) -> list[SoftmaxSeen]:
    """Every softmax over the keys of a sequence in one call on hidden [B, S, H], in order."""
    if call.hidden.ndim != 3:
        return []
    with torch.no_grad(), _Watch() as seen:
        call.replay(call.hidden)
    batch, length = call.hidden.shape[:2]
    found = []
    for at, (kind, held) in enumerate(seen.events):
        if kind == "fused" and held[0].shape[-2] == length:
            query, key, value, attended, scores = held
            found.append(SoftmaxSeen(query, key, value, attended, scores, seen.ones))
        if kind == "softmax" and (plain := _between_products(seen.events, at, batch, length)) is not None:
            plain.multiplied_by_one = seen.ones
            found.append(plain)
    return found


def _between_products(
    events: list[tuple[str, tuple[Tensor, ...]]], at: int, batch: int, length: int
) -> SoftmaxSeen | None:
    """The softmax at `at` with the last product before it that has its shape, and the first after it that it feeds."""
    scores = events[at][1][0]
    rows, width = scores.shape[-2:]
    count = scores.numel() // max(1, rows * width)
    if rows != length or count % batch:
        return None
    before = [held for kind, held in events[:at] if kind == "product" and held[2].shape[:2] == (count, rows)]
    before = [held for held in before if held[2].shape[2] in {width, width - 1}]
    if not before:
        return None
    query, key, product = before[-1]
    keys = product.shape[2]
    after = [held for kind, held in events[at + 1 :] if kind == "product" and held[0].shape == (count, rows, keys)]
    if not after:
        return None
    _, value, attended = after[0]
    heads = count // batch

    def apart(part: Tensor) -> Tensor:
        return part.reshape(batch, heads, *part.shape[1:])

    return SoftmaxSeen(
        apart(query),
        apart(key.transpose(1, 2)),
        apart(value),
        apart(attended),
        scores.reshape(batch, heads, rows, width),
    )
