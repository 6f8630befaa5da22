"""Layers that run several times, proven: by the same blocks in the first pass and in later ones, which may be wired
otherwise and may have parts of their own."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import literal
from dayzero.onboard.oracle.calls import Call, Undiscovered
from dayzero.onboard.prove.proven import (
    NotProven,
    ProvenAgain,
    ProvenLayer,
    ProvenLoop,
    ProvenPart,
    ProvenStep,
    Unproven,
)
from dayzero.onboard.prove.prover import Prover
from dayzero.onboard.shrink.shrink import kind_of
from dayzero.onboard.structure.kept_inputs import is_kept
from dayzero.onboard.structure.layer_wiring import Again
from dayzero.onboard.structure.loops import (
    in_pass,
    message_call,
    message_of,
    passes_evidence,
    with_other_messages,
)
from dayzero.onboard.structure.several import SeveralCall


def prove_in_passes(
    prover: Prover, prove_layer: Callable[[], ProvenLayer], index: int, last: dict[str, Call]
) -> ProvenLayer:
    """Layer `index`, as it is in the last pass, whose calls these are, and in the first. Raises NotProven."""
    assert prover.loop is not None
    layer = f"{prover.layers}.{index}"
    message = message_of(prover.calls, prover.loop, index)
    calls = last
    if message is not None:
        calls, message = with_other_messages(last, layer, message)
    with prover.seeing(calls, Again(message)):
        later = prove_layer()
    places = {part.path: part.unit.call.places for part in later.parts if isinstance(part.unit.call, SeveralCall)}
    with prover.seeing(in_pass(prover.calls, prover.layers, prover.loop, 0), Again(None, places)):
        first = prove_layer()
    found = both_passes(layer, first, later)
    return replace(found, keeps={"x": literal(1.0, "plain sum")} if is_kept(last, layer) else {})


def both_passes(layer: str, first: ProvenLayer, later: ProvenLayer) -> ProvenLayer:
    """One layer of what was proven of two passes. Raises NotProven where a module is another block in one of them."""
    known: dict[str, ProvenPart] = {part.unit.path: part for part in first.parts if part.unit.path}
    taken = {part.unit.name for part in first.parts}
    own: list[ProvenPart] = []
    steps: list[ProvenStep] = []
    for part in later.parts:
        held = known.get(part.unit.path)
        if held is not None and held.attempt.candidate.key != part.attempt.candidate.key:
            why = "it is one block in the first pass and another in later ones"
            raise NotProven([Unproven(f"{layer}.{part.unit.path}", why)])
        if held is None:
            held = replace(part, unit=replace(part.unit, name=_free(part.unit.name, taken)))
            own.append(held)
            if part.unit.path:
                known[part.unit.path] = held
        steps.append(ProvenStep(part.unit.name, held.unit.name, [part.factors, *part.more]))
    return replace(first, again=ProvenAgain(own, steps, later.gives))


def _free(name: str, taken: set[str]) -> str:
    """The name, numbered on where it is taken; now it is."""
    made, number = name, 2
    while made in taken:
        made, number = f"{name}_{number}", number + 1
    taken.add(made)
    return made


def prove_loop(
    prover: Prover,
    reference: nn.Module,
    ids: Tensor,
    layers: list[ProvenLayer],
    signatures: list[Any],
    unproven: list[Unproven],
) -> ProvenLoop | None:
    """How often layers run and what they are handed; None where each runs once, or where something stays open, which is
    added to `unproven`."""
    loop = prover.loop
    if loop is None or len(layers) != len(signatures):
        return None
    kinds = [kind_of(signature) for signature in signatures]
    once = {kind for index, kind in enumerate(kinds) if index not in loop.layers}
    if once & {kinds[index] for index in loop.layers}:
        unproven.append(Unproven("structure", "layers run several times that nothing tells from those that run once"))
        return None
    try:
        passes = passes_evidence(reference, ids, prover.layers, loop)
    except Undiscovered as error:
        unproven.append(Unproven("structure", str(error)))
        return None
    message = None
    if loop.message is not None:
        message = prover.best(("join",), loop.message, ("message",), call=message_call(prover.calls, loop))
        if message is None:
            unproven.append(prover.unproven[loop.message])
            return None
    return ProvenLoop(loop, passes, message)
