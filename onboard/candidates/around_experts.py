"""What stands around routed experts, by whose values are whose: shared layers, latent projections, norms, biases."""

import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, literal, present, size
from dayzero.onboard.candidates.expert_banks import banks
from dayzero.onboard.candidates.experts import propose_experts
from dayzero.onboard.candidates.gates import gate_arguments
from dayzero.onboard.candidates.moe_parts import Parts, close, same_stream
from dayzero.onboard.candidates.nesting import Inner
from dayzero.onboard.oracle.calls import Call, same
from dayzero.runtime.block_spec import BlockSpec
from dayzero.runtime.nn.gated_activation import gated
from dayzero.runtime.weights import Concat, Flatten, Source, Stored, Transpose


def expert_norm(parts: Parts) -> Candidate | None:
    inside = [c for path, c in parts.norms.items() if path.startswith(f"{parts.bank.owner}.") and parts.bank.owner]
    return inside[0] if len(inside) == 1 else None


Around = tuple[dict[str, Evidence | Candidate], dict[str, Source]]


def surroundings(parts: Parts, width: int) -> Iterator[Around]:
    """What stands around the experts, by whose values are whose."""
    arguments: dict[str, Evidence | Candidate] = {}
    parameters: dict[str, Source] = {}
    given = parts.container.result if parts.container is not None else None
    if (norm := expert_norm(parts)) is not None:
        arguments["expert_norm"] = norm
    for path, norm in parts.norms.items():
        call = parts.site.inner[path]
        if same(call.result, parts.site.call.result):
            arguments["output_norm"] = norm
        elif parts.expert_input is not None and same_stream(call.result, parts.expert_input):
            arguments["latent_norm"] = norm
        elif given is not None and call.hidden.numel() == given.numel() and same(call.hidden, given):
            arguments["routed_norm"] = norm
    linears = {p: c for p, c in parts.site.inner.items() if isinstance(c.module, nn.Linear) and c.has_stream}
    outside = {p: c for p, c in linears.items() if not parts.is_of_bank_or_router(p) and not _within(p, parts.shared)}
    if not (parts.expert_input is None or same_stream(parts.expert_input, parts.stream)):
        latent = _latent(parts, outside, width)
        if latent is None:
            return
        arguments |= latent[0]
        parameters |= latent[1]
    gates = [
        p
        for p, c in outside.items()
        if c.module.get_parameter("weight").shape[0] == 1 and same_stream(c.hidden, parts.stream)
    ]
    if len(gates) == 1:
        arguments["shared_gate"] = literal(True, f"{gates[0]} has one output")
        parameters["gate.weight"] = Stored(f"{gates[0]}.weight")
    shared = list(parts.shared.values()) or list(_inline_shared(parts, outside))
    if len(shared) > 1:
        return
    if shared:
        arguments["shared"] = shared[0]
    biases = [n for n, t in parts.free.items() if t.ndim == 1 and "." not in n and t.numel() == parts.stream.shape[1]]
    if len(biases) == 1:
        arguments["bias"] = literal(True, f"the parameter {biases[0]}")
        parameters["bias"] = Stored(biases[0])
    halved = [s for s in parts.site.operations.sequence if s.name == "div" and s.numbers[-1:] == (2.0,)]
    if halved and shared:
        arguments["average"] = literal(True, "the trace halves the sum")
    yield arguments, parameters


def _inline_shared(parts: Parts, linears: dict[str, Call]) -> Iterator[Candidate]:
    """A gated layer whose three projections are the module's own: one whose input is made of what two others give."""
    stream = parts.stream
    readers = {p: c for p, c in linears.items() if same_stream(c.hidden, stream)}
    for down, last in linears.items():
        width = last.module.get_parameter("weight").shape[1]
        fitting = [p for p, c in readers.items() if p != down and c.module.get_parameter("weight").shape[0] == width]
        for (gate, up), act in itertools.product(
            itertools.permutations(fitting, 2), gate_arguments(Inner(parts.site, ""))
        ):
            spec = act.resolve(parts.site.module, parts.site.config)
            form: Any = spec.build() if isinstance(spec, BlockSpec) else spec
            made = gated(form, linears[gate].result, linears[up].result)
            if close(made, last.hidden):
                arguments: dict[str, Evidence | Candidate] = {
                    "hidden": size(f"{gate}.weight", 1),
                    "width": size(f"{gate}.weight", 0),
                    "act": act,
                    "bias": present(f"{gate}.bias"),
                }
                kinds = ("weight", "bias") if last.module.bias is not None else ("weight",)
                names = {"gate": gate, "up": up, "down": down}
                yield Candidate(
                    "GatedFeedForward",
                    arguments,
                    {f"{ours}.{kind}": Stored(f"{theirs}.{kind}") for ours, theirs in names.items() for kind in kinds},
                )
                return


def _within(path: str, owners: dict[str, Candidate]) -> bool:
    return any(f"{path}.".startswith(f"{owner}.") for owner in owners)


def _latent(parts: Parts, linears: dict[str, Call], width: int) -> Around | None:
    """The projections to the experts' width and back."""
    hidden = parts.stream.shape[1]
    into = [p for p, c in linears.items() if tuple(c.module.get_parameter("weight").shape) == (width, hidden)]
    out_of = [p for p, c in linears.items() if tuple(c.module.get_parameter("weight").shape) == (hidden, width)]
    if len(into) != 1 or len(out_of) != 1:
        return None
    parameters: dict[str, Source] = {}
    for name, path in (("into", into[0]), ("out_of", out_of[0])):
        parameters[f"{name}.weight"] = Stored(f"{path}.weight")
        if linears[path].module.bias is not None:
            parameters[f"{name}.bias"] = Stored(f"{path}.bias")
    return {
        "hidden": size(f"{into[0]}.weight", 1),
        "latent_bias": present(f"{into[0]}.bias"),
    }, parameters


def weighed_shared(parts: Parts) -> Candidate | None:
    """Shared experts [S, F, H] that the router weighs, as one feed-forward layer of width S * F."""
    for bank in banks(parts.site)[1:]:
        if len(bank.matrices) != 3:
            continue
        inner = Inner(parts.site, bank.owner)
        for container in propose_experts(inner, bank, parts.stream.shape[1]):
            gate_up = container.parameters["gate_up"]
            if not isinstance(gate_up, Concat):
                continue
            gate, up = (Flatten(0, part) for part in gate_up.parts)
            down = Transpose(Flatten(0, Transpose(container.parameters["down"])))
            arguments: dict[str, Evidence | Candidate] = {
                "hidden": container.arguments["hidden"],
                "width": _product(container.arguments["experts"], container.arguments["width"]),
                "act": container.arguments["act"],
                "parts": container.arguments["experts"],
            }
            weights: dict[str, Source] = {"gate.weight": gate, "up.weight": up, "down.weight": down}
            return Candidate("GatedFeedForward", arguments, weights)
    return None


def _product(a: Any, b: Any) -> Evidence:
    return Evidence(
        f"{a.label} * {b.label}", lambda module, config: a.resolve(module, config) * b.resolve(module, config)
    )
