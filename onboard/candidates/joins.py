"""Candidates for what joins several values of the stream without mixing tokens: attention over depth, gates between the
stream and a branch, learned affine sums."""

import itertools
from collections.abc import Iterator
from math import prod

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal, size
from dayzero.onboard.candidates.factor import explain_factor
from dayzero.onboard.candidates.nesting import Inner
from dayzero.onboard.candidates.norm import epsilons
from dayzero.onboard.oracle.reference import state_of
from dayzero.runtime.weights import Source, Squeeze, Stored


def propose_join(site: Site) -> list[Candidate]:
    """By the shapes of the parameters: all of them vectors over the stream, or rows of them."""
    width = site.call.inputs[-1].shape[-1]
    state = {name: tensor for name, tensor in state_of(site.module).items() if tensor.is_floating_point()}
    shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if sorted(map(len, shapes.values())) == [2, 2, 2] and len(site.call.inputs) == 2:
        return list(_message_gates(site, shapes, width))
    if not state or any(tensor.shape[-1] != width or tensor.ndim > 3 for tensor in state.values()):
        return []
    vectors = [name for name, shape in shapes.items() if len(shape) == 1]
    if "softmax" in site.operations.steps:
        return list(_attention(site, shapes))
    if len(vectors) == len(shapes) == 1:
        return list(_gates(site, vectors[0]))
    if len(vectors) == len(shapes) == 4 and len(site.call.inputs) == 2:
        return list(_affine_sums(site, vectors))
    return []


def _attention(site: Site, shapes: dict[str, tuple[int, ...]]) -> Iterator[Candidate]:
    """One query or several, and a norm with a weight or none."""
    width = site.call.inputs[-1].shape[-1]
    queries = site.call.result.shape[-1] // width
    for query, shape in shapes.items():
        rest = [name for name in shapes if name != query]
        if len(rest) > 1 or prod(shape[:-1]) != queries:
            continue
        if any(len(shapes[name]) != 1 for name in rest):
            continue
        count = size(query, len(shape) - 2) if queries > 1 else literal(1, "one output")
        held: Source = Squeeze((0,), Stored(query)) if queries == 1 and len(shape) == 2 else Stored(query)
        sets = {"sets": size(query, 0)} if len(shape) == 3 else {}
        parameters = {"query": held, **({"norm.weight": Stored(rest[0])} if rest else {})}
        for eps, scale, normed in itertools.product(epsilons(site), _scales(site, width), (False, True)):
            arguments = {
                "hidden": size(query, len(shape) - 1),
                "eps": eps,
                "scale": scale,
                "queries": count,
                "weighted": literal(bool(rest), "the parameters"),
                "normed_values": literal(normed, "enumerated"),
                **sets,
            }
            yield Candidate("AttentionResidual", arguments, dict(parameters))


def _message_gates(site: Site, shapes: dict[str, tuple[int, ...]], width: int) -> Iterator[Candidate]:
    """A matrix that reads both inputs, and of what it makes two gates."""
    down = [name for name, shape in shapes.items() if shape[1] == 2 * width]
    gates = [name for name, shape in shapes.items() if shape[0] == width and name not in down]
    if len(down) != 1 or len(gates) != 2 or "tanh" not in site.operations.steps:
        return
    for eps, (forget, take) in itertools.product(epsilons(site), itertools.permutations(gates)):
        arguments = {"hidden": size(forget, 0), "rank": size(down[0], 0), "eps": eps}
        parameters = {"down.weight": Stored(down[0]), "forget.weight": Stored(forget), "take.weight": Stored(take)}
        yield Candidate("MessageGate", arguments, parameters)


def _scales(site: Site, width: int) -> list[Evidence]:
    """Factors right before the softmax; the width's own root as what it is."""
    found = []
    factors = [step.numbers[-1] for step in site.operations.sequence if step.name == "mul" and step.numbers]
    for value in dict.fromkeys(factor for factor in factors if factor != 1.0):
        if abs(value - width**-0.5) <= 1e-12 * value:
            found.append(_root(site))
        else:
            found.append(explain_factor(value, site.module, site.config))
    return [*found, literal(1.0, "no factor in the trace")]


def _root(site: Site) -> Evidence:
    name, tensor = next(iter(state_of(site.module).items()))
    last = tensor.ndim - 1
    return Evidence(
        f"1 / sqrt(shape of {name}[{last}])", lambda module, config: module.get_parameter(name).shape[last] ** -0.5
    )


def _gates(site: Site, gate: str) -> Iterator[Candidate]:
    """A temperature that the gate is divided by, a floor under what is left of the stream."""
    if "sigmoid" not in site.operations.steps or len(site.call.inputs) != 2:
        return
    inner = Inner(site, "")
    steps = site.operations.sequence
    floors = dict.fromkeys(step.numbers[0] for step in steps if step.name.startswith("clamp") and step.numbers)
    divided = dict.fromkeys(step.numbers[-1] for step in steps if step.name == "div" and step.numbers)
    temperatures = [inner.cause(value) for value in divided] or [literal(1.0, "no division in the trace")]
    for temperature, floor, first in itertools.product(temperatures, floors, (False, True)):
        arguments = {
            "hidden": size(gate, 0),
            "temperature": temperature,
            "eps": inner.cause(floor),
            "branch_first": literal(first, "enumerated"),
        }
        yield Candidate("ResidualGate", arguments, {"gate": Stored(gate)})


def _affine_sums(site: Site, vectors: list[str]) -> Iterator[Candidate]:
    roles = ("first.weight", "first.bias", "second.weight", "second.bias")
    for order in itertools.permutations(vectors):
        yield Candidate(
            "AffineSum",
            {"width": size(order[0], 0)},
            {role: Stored(name) for role, name in zip(roles, order, strict=True)},
        )
