"""What a feed-forward layer applies between its projections: read from the operators and scalars of its trace."""

import itertools
from collections.abc import Iterator
from typing import get_args

from dayzero.onboard.candidates.evidence import Candidate, Evidence, literal
from dayzero.onboard.candidates.nesting import Inner
from dayzero.onboard.prove.trace import Operations, Step
from dayzero.runtime.nn.activation import Activation

_STEP_OF_ACTIVATION = {"silu": "silu", "gelu": "gelu", "gelu_tanh": "gelu", "relu": "relu", "relu2": "relu"}
_INFINITE = float("inf")


def activations(operations: Operations) -> list[Activation]:
    """Activations whose step the trace shows; all of them where it shows none, for spellings that we do not know."""
    names = list(get_args(Activation))
    return [name for name in names if _STEP_OF_ACTIVATION[name] in operations.steps] or names


def activation_arguments(inner: Inner) -> list[Evidence]:
    """The activation of a layer without a gate."""
    return [literal(name, "the trace's activation") for name in activations(inner.operations)]


def gate_arguments(inner: Inner) -> list[Evidence | Candidate]:
    """The gate of a gated layer, the forms that the trace suggests first."""
    forms: list[Evidence | Candidate] = []
    names = {step.name for step in inner.operations.sequence}
    if "clamp" in names:
        forms += _clamped(inner)
    if "tanh" in names:
        forms += _softcapped(inner)
    return [*forms, *activation_arguments(inner)]


def _clamped(inner: Inner) -> Iterator[Candidate]:
    """Clamps before or after the activation; with a factor inside the sigmoid where it is spelt out."""
    sequence = inner.operations.sequence
    for limit in _limits(inner):
        first_clamp = _position(sequence, {"clamp"})
        for name in activations(inner.operations):
            act = literal(name, "the trace's activation")
            activated = _position(sequence, {_STEP_OF_ACTIVATION[name]})
            for after in sorted((False, True), key=lambda after: after != (activated < first_clamp)):
                arguments = {"act": act, "limit": limit, "after": literal(after, "the trace's order")}
                yield Candidate("ClampedGLU", arguments, {})
        if "sigmoid" in inner.operations.steps:
            for alpha in _before(sequence, "sigmoid", "mul"):
                yield Candidate("OaiSwiGLU", {"alpha": inner.cause(alpha), "limit": limit}, {})


def _limits(inner: Inner) -> list[Evidence]:
    """Where the bounds of the clamps come from; infinite ones are a limit that this layer does not use."""
    clamps = {step.numbers for step in inner.operations.sequence if step.name == "clamp"}
    # One from above, of the gate, and one on both sides, of the value: a single clamp is another thing.
    bounds = {numbers[0] for numbers in clamps if len(numbers) == 1 and (-numbers[0], numbers[0]) in clamps}
    found = [inner.cause(bound) for bound in sorted(bounds) if bound != _INFINITE]
    if _INFINITE in bounds:
        unused = literal(_INFINITE, "the clamp in the trace")
        found.append(inner.driver(_INFINITE, 3.25, lambda seen: 3.25 in seen.constants) or unused)
    return found


def _softcapped(inner: Inner) -> Iterator[Candidate]:
    """Two caps, of the gate and of the value, in both orders."""
    caps = list(dict.fromkeys(_before(inner.operations.sequence, "tanh", "div")))
    pairs = [(gate, up) for gate in caps for up in caps if gate != up or len(caps) == 1]
    for gate, up in pairs:
        yield Candidate("SoftcappedGLU", {"gate_cap": inner.cause(gate), "up_cap": inner.cause(up)}, {})


def factors_before(inner: Inner, names: list[Activation]) -> list[float]:
    """Scalars that a value is multiplied by right before its activation."""
    steps = {_STEP_OF_ACTIVATION[name] for name in names}
    return [value for step in sorted(steps) for value in _before(inner.operations.sequence, step, "mul")]


def _position(sequence: list[Step], names: set[str]) -> int:
    return next((place for place, step in enumerate(sequence) if step.name in names), len(sequence))


def _before(sequence: list[Step], name: str, factor: str) -> list[float]:
    """Scalars of the operator `factor` right before each operator `name`, distinct ones in order."""
    arithmetic = [step for step in sequence if step.name in {name, factor}]
    pairs = itertools.pairwise(arithmetic)
    found = [a.numbers[-1] for a, b in pairs if a.name == factor and b.name == name and a.numbers]
    return list(dict.fromkeys(found))
