"""Tables that a reference computes in its constructors and that a checkpoint stores as well: they must agree.

The reference computes with the stored ones, our model with its own; nothing else would show a difference.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.oracle.constructed import built_again
from dayzero.onboard.oracle.reference import build
from dayzero.runtime.spec import RuleSpec
from dayzero.runtime.weights import BoundRule, bind
from dayzero.runtime.weights.node import Reader, Shapes


def table_errors(
    config: Mapping[str, Any],
    rules: Sequence[RuleSpec],
    mapped: Mapping[str, BoundRule],
    reader: Reader,
    shapes: Shapes,
) -> dict[str, float]:
    """Infinity for every stored table that is not what the reference's constructor computes, to the precision of its
    dtype; one line of 0 for the others.

    rules: parameter, a buffer of the reference -> the stored tensor. mapped: our parameters' rules. What one is made of
    must agree in every value, since ours is computed with it; of other tables, what is small beside the largest value
    is rounding of that.
    """
    reference, _ = build(config, device="meta")
    taken = {name for rule in mapped.values() for name in rule.names()}
    again: tuple[str, nn.Module | None] = "", None
    errors: dict[str, float] = {}
    agree = 0
    for name, rule in sorted(bind([rule.build() for rule in rules]).items()):
        stored = rule.names()
        if not shapes.keys() >= set(stored):
            continue  # nothing is stored that could differ
        owner, _, leaf = name.rpartition(".")
        if owner != again[0]:
            again = owner, built_again(reference.get_submodule(owner))
        expected = dict(again[1].named_buffers()).get(leaf) if again[1] is not None else None
        found = rule.read(reader, shapes)
        if expected is None or expected.is_meta:
            errors[f"{stored[0]} is computed in a way that cannot be repeated alone"] = float("inf")
        elif said := _difference(found, expected, exact=bool(taken & set(stored))):
            errors[f"{stored[0]} {said}"] = float("inf")
        else:
            agree += 1
    return errors | {f"{agree} stored tables are what the reference computes": 0.0}


def _difference(found: Tensor, expected: Tensor, exact: bool) -> str:
    """How a stored table is not the expected one; "" where it is, to the precision of its dtype."""
    if found.shape != expected.shape:
        return f"is {list(found.shape)}, and the reference computes {list(expected.shape)}"
    wanted = expected.to(torch.float64)
    size = wanted.abs() if exact else wanted.abs().amax()
    misses = (found.to(torch.float64) - wanted).abs()
    allowed = size * torch.finfo(found.dtype).eps
    if bool((misses <= allowed).all()):  # never so for NaN
        return ""
    place = (misses - allowed).nan_to_num(float("inf")).argmax()
    holds, computes = found.flatten()[place].item(), wanted.flatten()[place].item()
    return f"holds {holds:.6g} where the reference computes {computes:.6g}"
