"""The formula of factors by position that a model hands to its attention layers."""

import math
from collections.abc import Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Candidate, literal
from dayzero.onboard.candidates.factor import explain_factor
from dayzero.runtime.nn.query_scale import position_scale

_EXACT = 1e-12


def propose_position_scale(factors: Tensor, position: Tensor, model: nn.Module, config: Any) -> Candidate | None:
    """The formula that gives `factors` [T] at `position` [T]; None where no formula here does.

    Its two constants are solved, and then looked for among the config's numbers.
    """
    for kind, factor, length in _solved(factors, position):
        ours = position_scale(kind, position, factor, length, torch.float64)
        if float((ours - factors).abs().max()) <= _EXACT * float(factors.abs().max()):
            arguments = {
                "kind": literal(kind, "the only formula that gives them"),
                "factor": explain_factor(factor, model, config),
                "length": explain_factor(length, model, config),
            }
            return Candidate("PositionScale", arguments, {})
    return None


def _solved(factors: Tensor, position: Tensor) -> Iterator[tuple[Literal["power"], float, float]]:
    """Constants of (1 + (p + 1) / length) ** factor, from the first position and the last."""
    first, last = int(position.argmin()), int(position.argmax())
    low_log, high_log = math.log(float(factors[first])), math.log(float(factors[last]))
    near, far = float(position[first]) + 1.0, float(position[last]) + 1.0
    if not 0 < low_log < high_log or near == far:
        return
    wanted = high_log / low_log  # grows from 1 to far / near as the length grows

    def ratio(length: float) -> float:
        return math.log1p(far / length) / math.log1p(near / length)

    low, high = 1e-3, 1e12
    for _ in range(300):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if ratio(middle) < wanted else (low, middle)
    for length in dict.fromkeys((float(round(low)), float(f"{low:.6g}"))):
        if length > 0:
            yield "power", float(f"{high_log / math.log1p(far / length):.9g}"), length
