"""What is added to embeddings for their tokens' positions: a formula that gives just what the reference's module gives,
on the captured ids and on others, padding among them."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from dayzero.onboard.candidates.equality import CLOSE
from dayzero.onboard.candidates.evidence import Candidate, Evidence, attribute, literal
from dayzero.onboard.oracle.calls import Call, floats, tensors

_BASE = 10000.0


def propose_positions(call: Call, ids: Tensor, config: Any) -> Candidate | None:
    """call: of a module that is fed ids [B, S] and gives [B, S, H]. None where no formula here gives the same."""
    for candidate in _candidates(call):
        try:
            spec = candidate.spec(call.module, config)
        except (ValueError, TypeError, AttributeError):
            continue
        others = _others(ids, spec.arguments.get("padding"))
        if all(_same(spec.build(), call, ids, other) for other in others):
            return candidate
    return None


def _candidates(call: Call) -> Iterator[Candidate]:
    """Widths are those of the output; ids that do not count are ones that the module names."""
    width = _width(call)
    names = [name for name, held in sorted(vars(call.module).items()) if type(held) is int and not name.startswith("_")]
    for name in names:
        first = Evidence(f"attribute {name} + 1", lambda module, config, name=name: getattr(module, name) + 1)
        yield _candidate(width, attribute("", name), first)
    for number in (0, 1, 2):
        yield _candidate(width, None, literal(number, "the first token's"))


def _candidate(width: Evidence, padding: Evidence | None, first: Evidence) -> Candidate:
    base = literal(_BASE, "what its table is made with")
    held = {"width": width, "base": base, "first": first} | ({"padding": padding} if padding is not None else {})
    return Candidate("SinusoidalPositions", held, {})


def _width(call: Call) -> Evidence:
    """The stream's width, from an attribute of the module, or else from what it gave."""
    wide = call.result.shape[-1]
    names = [name for name, held in sorted(vars(call.module).items()) if type(held) is int and held == wide]
    return attribute("", names[0]) if names else literal(wide, "what it gave")


def _others(ids: Tensor, padding: int | None) -> Iterator[Tensor]:
    """Ids [B, S]: as captured, and with padding at the start, in between, and at the end."""
    yield ids
    if padding is not None:
        changed = ids.clone()
        changed[0, :2], changed[-1, -3:], changed[:, ids.shape[1] // 2] = padding, padding, padding
        yield changed


def _same(block: Any, call: Call, ids: Tensor, other: Tensor) -> bool:
    def swap(value: Any) -> Any:
        return other if isinstance(value, Tensor) and value.shape == ids.shape and torch.equal(value, ids) else value

    args, kwargs = call.arguments(swap)
    if not any(value is other for value in tensors((args, kwargs))):
        return False
    with torch.no_grad():
        theirs = floats(call.replay_exactly(args, kwargs))[0]
        lengths = (other.shape[1],) * other.shape[0]
        ours = block(other.flatten(), lengths, theirs.dtype).view(theirs.shape)
    return bool((ours - theirs).norm() <= CLOSE * theirs.norm())
