"""The layers of a reference taken apart into proven blocks: every distinct part of every layer."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from dayzero.onboard.candidates import Candidate, Evidence
from dayzero.onboard.candidates.evidence import literal
from dayzero.onboard.candidates.factor import explain_factor, explain_in_all
from dayzero.onboard.candidates.routing import routing_call
from dayzero.onboard.lift.lifting import parts_of
from dayzero.onboard.oracle.calls import Undiscovered
from dayzero.onboard.prove.block import Attempt
from dayzero.onboard.prove.loop import prove_in_passes
from dayzero.onboard.prove.proven import NotProven, ProvenLayer, ProvenPart, Unproven
from dayzero.onboard.prove.prover import Prover, handed
from dayzero.onboard.prove.rotary_tables import Rotaries, uses_tables
from dayzero.onboard.shrink.shrink import part_signature
from dayzero.onboard.structure.layer_wiring import layer_parts
from dayzero.onboard.structure.loops import LoopParts, in_pass
from dayzero.onboard.structure.stream_wiring import as_streams, has_streams, stream_layer
from dayzero.onboard.structure.units import LayerParts, Unit
from dayzero.runtime.weights import Stored

# What may stand for a unit, by the role that its call shows.
_PROPOSE_AS = {
    "norm": ("norm", "ffn"),
    "mixer": ("mixer",),
    "cross": ("cross",),
    "ffn": ("ffn", "norm"),
    "join": ("join",),
    "projection": ("projection",),
    "routing": ("routing",),
    "chain": ("chain",),
}


def prove_layers(
    prover: Prover,
    rotaries: Rotaries,
    path: str,
    signatures: list[Any],
    unproven: list[Unproven],
    loop: LoopParts | None = None,
) -> list[ProvenLayer]:
    """The layers of the list at `path`; what stays open is added to `unproven`. loop: which run several times."""
    layers: list[ProvenLayer] = []
    last = prover.calls if loop is None else in_pass(prover.calls, path, loop, -1)
    for index, signature in enumerate(signatures):
        try:
            if loop is not None and index in loop.layers:
                seen = partial(_prove_layer, prover, rotaries, f"{path}.{index}", signature)
                layers.append(prove_in_passes(prover, seen, index, last))
                continue
            with prover.seeing(last if loop is not None and index >= loop.first else prover.calls):
                layers.append(_prove_or_lift_layer(prover, rotaries, f"{path}.{index}", signature))
        except NotProven as error:
            unproven += [item for item in error.unproven if item not in unproven]
    _agree(layers, prover, path)
    return layers


def _prove_or_lift_layer(prover: Prover, rotaries: Rotaries, layer: str, signature: Any) -> ProvenLayer:
    """The layer by its parts; as its own code with proven blocks inside, where its wiring is no sum of parts."""
    try:
        return _prove_layer(prover, rotaries, layer, signature)
    except NotProven as error:
        call = prover.calls[layer]
        inside: dict[str, Candidate] = {}
        for path, role in parts_of(prover.calls, layer).items():
            # As a unit that reads one value has it, so that nothing is searched for twice.
            key = (role, 1, part_signature(signature, path), handed(prover.calls[f"{layer}.{path}"]))
            if (attempt := prover.best(_PROPOSE_AS[role], f"{layer}.{path}", key)) is not None:
                inside[path] = attempt.candidate
        why = "; ".join(item.why if item.where in {"structure", layer} else str(item) for item in error.unproven)
        attempt = prover.lifted(layer, ("layer", signature, handed(call)), replace=inside, why=why)
        if attempt is None:
            own = prover.unproven.get(layer)  # none where a layer like it was tried before
            raise NotProven(_with_own_code(error.unproven, own) if own else error.unproven) from None
        unit = Unit("layer", "", "layer", {"x": 1.0})
        tables = rotaries.indices(call) if uses_tables(attempt.candidate) else []
        part = ProvenPart(unit, attempt, _factors(unit.reads, prover, layer), tables)
        return ProvenLayer([part], _factors({"layer": 1.0}, prover, layer))


def _with_own_code(unproven: list[Unproven], layer: Unproven) -> list[Unproven]:
    """What is open in a layer, one item a thing. Open parts say themselves why their code is not copied; of wiring that
    is no sum, the layer's own code says it."""
    wiring = {"structure", layer.where}
    return [
        replace(
            item, why=f"{item.why}; its own code is not copied: {layer.why}", tried=[*item.tried, *layer.tried][-3:]
        )
        if item.where in wiring
        else item
        for item in unproven
    ]


def _prove_layer(prover: Prover, rotaries: Rotaries, layer: str, signature: Any) -> ProvenLayer:
    """The layer's wiring and a block for each of its units; a unit that no block explains is looked into, and where
    nothing inside explains it, its own code is copied.

    Raises NotProven with what stays open, of the coarsest wiring.
    """
    if has_streams(prover.calls[layer], prover.streams):
        return _prove_stream_layer(prover, rotaries, layer, signature)
    expanded: set[str] = set()
    first: list[str] = []  # what is open in the coarsest wiring
    said = ""
    wirings: list[LayerParts] = []
    while True:
        try:
            wirings.append(layer_parts(prover.calls, layer, expanded, prover.again))
        except Undiscovered as error:
            if not wirings:
                raise NotProven([Unproven("structure", str(error))]) from None
            break
        proven, open_units = _prove_units(prover, rotaries, layer, signature, wirings[-1], lift=False)
        beside = "" if open_units else prover.beside(layer, wirings[-1])
        if not open_units and not beside:
            return _proven_layer(prover, layer, proven, wirings[-1])
        if not first and not said:
            first, said = [f"{layer}.{path}" for path in open_units], beside
        expandable = {path for path in open_units if len(list(prover.calls[f"{layer}.{path}"].module.children())) > 1}
        if not expandable:
            break
        expanded |= expandable
    for wiring in reversed(wirings):  # the finest first: as little as possible is copied
        proven, open_units = _prove_units(prover, rotaries, layer, signature, wiring, lift=True)
        if not open_units and not prover.beside(layer, wiring):
            return _proven_layer(prover, layer, proven, wiring)
    raise NotProven(prover.open(first) or [Unproven(layer, f"it {said}")])


def _proven_layer(prover: Prover, layer: str, parts: list[ProvenPart], wiring: LayerParts) -> ProvenLayer:
    return ProvenLayer(parts, _factors(wiring.gives, prover, layer), _factors(wiring.keeps or {}, prover, layer))


def _prove_units(
    prover: Prover, rotaries: Rotaries, layer: str, signature: Any, wiring: LayerParts, lift: bool
) -> tuple[list[ProvenPart], list[str]]:
    """The units of a wiring that are proven, and the paths of those that are not. lift: copied where no block is."""
    open_units: list[str] = []
    proven: list[ProvenPart] = []
    for unit in wiring.units:
        if not unit.is_module and unit.role != "chain":
            made = Attempt(Candidate("SideBySide", {}, {}), 0.0, "wiring")
            if unit.role == "scale":
                made = _scale(unit, prover.calls[layer].module)
            more = [_factors(terms, prover, layer) for terms in unit.more]
            proven.append(ProvenPart(unit, made, _factors(unit.reads, prover, layer), [], more))
            continue
        path = f"{layer}.{unit.path}"
        call = unit.call if unit.role != "routing" else routing_call(prover.calls[path], unit.classes)
        own = part_signature(signature, unit.path)
        key = (unit.role, len(unit.inputs), own, handed(call or prover.calls[path]))
        roles = _PROPOSE_AS[unit.role] if len(unit.inputs) == 1 else ("mixer of several", "join")
        attempt = prover.best(roles, path, key, call=call)
        if attempt is None and lift and unit.role not in {"routing", "chain"}:
            attempt = prover.lifted(path, key, roles, call=call)
        if attempt is None:
            open_units.append(unit.path)
            continue
        tables = rotaries.indices(prover.calls[path]) if uses_tables(attempt.candidate) else []
        more = [_factors(terms, prover, layer) for terms in unit.more]
        proven.append(ProvenPart(unit, attempt, _factors(unit.reads, prover, layer), tables, more))
    return proven, open_units


def _prove_stream_layer(prover: Prover, rotaries: Rotaries, layer: str, signature: Any) -> ProvenLayer:
    """A layer between several streams: each block with the connection that feeds it, as one part."""
    try:
        wiring = stream_layer(prover.calls, layer, prover.streams)
    except Undiscovered as error:
        raise NotProven([Unproven("structure", str(error))]) from None
    parts: list[ProvenPart] = []
    unproven: list[str] = []
    reads = {"x": 1.0}
    for item in wiring:
        held: dict[str, Attempt] = {}
        inner = {"connection": item.connection, "norm": item.norm, "block": item.block}
        wanted = {name: path for name, path in inner.items() if path is not None}
        for name, child in wanted.items():
            path = f"{layer}.{child}"
            key = (name, part_signature(signature, child), handed(prover.calls[path]))
            call = as_streams(prover.calls[path], prover.streams) if name == "connection" else None
            roles = () if item.connection is None else (item.name if name == "block" else name,)
            attempt = prover.best(roles, path, key, call=call)
            if attempt is None and item.connection is None:
                attempt = prover.lifted(path, key, roles)
            if attempt is None:
                unproven.append(path)
            else:
                held[name] = attempt
        if len(held) < len(wanted):
            continue
        if item.connection is None:
            unit, chosen = Unit(item.name, item.block, item.name, reads), held["block"]
            reads = {**reads, item.name: 1.0}
        else:
            worst = max(held.values(), key=lambda attempt: attempt.error)
            inside: dict[str, Any] = {name: attempt.candidate.below(wanted[name]) for name, attempt in held.items()}
            none = {} if item.norm else {"norm": literal(None, "no module between")}
            executed = "; ".join(f"{name}: {attempt.operations}" for name, attempt in held.items())
            skipped = "; ".join(f"{name}: {attempt.skipped}" for name, attempt in held.items() if attempt.skipped)
            candidate = Candidate("HyperConnected", {**inside, **none}, {})
            chosen = replace(worst, candidate=candidate, operations=executed, skipped=skipped)
            unit = Unit(item.name, "", item.name, reads)
            reads = {item.name: 1.0}
        uses = uses_tables(chosen.candidate)
        tables = rotaries.indices(prover.calls[f"{layer}.{item.block}"]) if uses else []
        parts.append(ProvenPart(unit, chosen, _factors(unit.reads, prover, layer), tables))
    if unproven:
        raise NotProven(prover.open(unproven))
    return ProvenLayer(parts, _factors(reads, prover, layer))


def _scale(unit: Unit, layer: nn.Module) -> Attempt:
    """A vector that the layer owns, as a block: solving the wiring has proven it."""
    width = Evidence(f"size of {unit.path}", lambda layer, config: getattr(layer, unit.path).numel())
    arguments = {"width": width}
    if not isinstance(getattr(layer, unit.path), nn.Parameter):
        arguments["trained"] = Evidence(
            f"whether {unit.path} is a parameter",
            lambda layer, config: isinstance(getattr(layer, unit.path), nn.Parameter),
        )
    return Attempt(Candidate("ChannelScale", arguments, {"weight": Stored(unit.path)}), 0.0, "wiring")


def _agree(layers: list[ProvenLayer], prover: Prover, path: str) -> None:
    """Gives factors that stand at the same place of several layers one explanation, where one fits them all."""
    places: dict[tuple, list[tuple[dict[str, Evidence], nn.Module]]] = {}
    for index, layer in enumerate(layers):
        module = prover.calls[f"{path}.{index}"].module
        sums = [(part.unit.name, [part.factors, *part.more]) for part in layer.parts]
        for name, held in (*sums, ("", [layer.gives, layer.keeps])):
            for number, terms in enumerate(held):
                for term in terms:
                    places.setdefault((name, number, term), []).append((terms, module))
    for (_, _, term), found in places.items():
        factors = [terms[term].resolve(module, prover.config) for terms, module in found]
        evidence = explain_in_all(factors, [module for _, module in found], prover.config)
        if evidence is not None:
            for terms, _ in found:
                terms[term] = evidence


def _factors(reads: Mapping[str, float], prover: Prover, layer: str) -> dict[str, Evidence]:
    module = prover.calls[layer].module
    return {name: explain_factor(factor, module, prover.config) for name, factor in reads.items()}
