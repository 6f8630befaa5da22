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


def with_first_ids(ids: Tensor) -> Tensor:
    """Ids [B, S] with 0, 1 and 2 among them, at the start, in between and at the end: they name padding and the like,
    and text that is drawn has none of them."""
    changed, places = ids.clone(), ids.shape[1]
    for number in range(min(3, places)):
        changed[:, [number, (places // 2 + number) % places, places - 1 - number]] = number
    return changed


def _others(ids: Tensor, padding: int | None) -> Iterator[Tensor]:
    """Ids [B, S]: as captured, with the first ids among them, and with padding at the start, in between, and at the
    end."""
    yield ids
    yield with_first_ids(ids)
    if padding is not None:
        changed = ids.clone()
        changed[0, :2], changed[-1, -3:], changed[:, ids.shape[1] // 2] = padding, padding, padding
        yield changed


def _same(block: Any, call: Call, ids: Tensor, other: Tensor) -> bool:
    made = on_ids(block, call, ids, other)
    return made is not None and bool((made[0] - made[1]).norm() <= CLOSE * made[1].norm())


def on_ids(block: Any, call: Call, ids: Tensor, other: Tensor) -> tuple[Tensor, Tensor] | None:
    """What the block and the call's module give for ids `other` in the place of the captured ones; None where the
    module was not handed these."""

    def swap(value: Any) -> Any:
        return other if isinstance(value, Tensor) and value.shape == ids.shape and torch.equal(value, ids) else value

    args, kwargs = call.arguments(swap)
    if not any(value is other for value in tensors((args, kwargs))):
        return None
    with torch.no_grad():
        theirs = floats(call.replay_exactly(args, kwargs))[0]
        lengths = (other.shape[1],) * other.shape[0]
        return block(other.flatten(), lengths, theirs.dtype).view(theirs.shape), theirs
