"""Candidates for the rotary tables, which belong to the model: every layer is handed the same ones."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, literal
from dayzero.onboard.discover import Call, tensors
from dayzero.runtime.nn import Rotary

TOLERANCE = 1e-12


def propose_rotary(call: Call, config: Any) -> Candidate | None:
    """The formula that gives exactly the tables of `call`, on the positions it was given and on far ones; else None."""
    cos = call.output[0]
    position = _positions(call, cos)
    if position is None:
        return None
    for theta in _thetas(config):
        for style in ("half", "interleaved"):
            candidate = Candidate(
                "Rotary",
                {"dim": _table_width(), "theta": theta, "style": literal(style, "enumerated")},
                {},
            )
            if _agrees(candidate, call, position, config):
                return candidate
    return None


def _table_width() -> Evidence:
    def resolve(module: nn.Module, config: Any) -> int:
        return 2 * next(buffer for buffer in module.buffers() if buffer.ndim == 1).shape[0]

    return Evidence("twice the number of frequencies", resolve)


def _positions(call: Call, table: Tensor) -> Tensor | None:
    found = [t for t in tensors((call.args, call.kwargs)) if not t.is_floating_point() and t.shape == table.shape[:-1]]
    return found[0] if found else None


def _thetas(config: Any) -> Iterator[Evidence]:
    """Numbers above 1 that the config holds: those of its rotary settings first."""
    for name, value in sorted((getattr(config, "rope_parameters", None) or {}).items()):
        if _is_base(value):
            yield Evidence(
                f"config rope_parameters.{name}", lambda module, config, name=name: float(config.rope_parameters[name])
            )
    for name, value in sorted(config.to_dict().items()):
        if _is_base(value):
            yield Evidence(f"config {name}", lambda module, config, name=name: float(getattr(config, name)))


def _is_base(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1 < value < float("inf")


def _agrees(candidate: Candidate, call: Call, position: Tensor, config: Any) -> bool:
    block = candidate.spec(call.module, config).build()
    assert isinstance(block, Rotary)
    for offset in (0, 1009, 20011):
        moved = position + offset
        args = tuple(moved if value is position else value for value in call.args)
        kwargs = {name: moved if value is position else value for name, value in call.kwargs.items()}
        with torch.no_grad():
            reference = call.replay_exactly(args, kwargs)
        ours = block(moved.flatten(), torch.float64)
        for theirs, mine in zip(reference, ours, strict=True):
            if theirs.flatten(0, -2).shape != mine.shape or not (theirs.flatten(0, -2) - mine).abs().max() <= TOLERANCE:
                return False
    return True
