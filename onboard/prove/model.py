"""The reference taken apart into proven blocks: every distinct part of every layer, proven once."""

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from dayzero.onboard.candidates import Candidate, Evidence, Site, site_of
from dayzero.onboard.candidates.evidence import literal, size
from dayzero.onboard.candidates.factor import explain_factor, explain_in_all
from dayzero.onboard.candidates.position_scale import propose_position_scale
from dayzero.onboard.candidates.positions import propose_positions
from dayzero.onboard.candidates.refit import refitted_to
from dayzero.onboard.candidates.routing import routing_call
from dayzero.onboard.lift.lifting import parts_of, prove_lifted
from dayzero.onboard.oracle.calls import Call, Undiscovered, tensors
from dayzero.onboard.oracle.reference import text_config
from dayzero.onboard.prove.block import Attempt, attempt, prove
from dayzero.onboard.prove.contradiction import contradiction
from dayzero.onboard.prove.loop import prove_in_passes, prove_loop
from dayzero.onboard.prove.proven import NotProven, Proven, ProvenEncoder, ProvenLayer, ProvenPart, Unproven
from dayzero.onboard.prove.rotary_tables import Rotaries, uses_tables
from dayzero.onboard.shrink.shrink import layer_signatures, part_signature
from dayzero.onboard.structure.between_parts import objection
from dayzero.onboard.structure.discover import ModelParts, discover
from dayzero.onboard.structure.handed import context_of
from dayzero.onboard.structure.handed import query_scale as query_scale_of
from dayzero.onboard.structure.kept_inputs import handed_on
from dayzero.onboard.structure.layer_inputs import find_layer_inputs
from dayzero.onboard.structure.layer_wiring import Again, LayerParts, Unit, layer_parts
from dayzero.onboard.structure.loops import LoopParts, in_pass
from dayzero.onboard.structure.stream_wiring import as_streams, has_streams, stream_layer
from dayzero.runtime.nn.wiring import PAST
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


class _Prover:
    """Proves modules of one reference, each distinct one once. usual: path -> the claim to try before any search."""

    def __init__(
        self, reference: nn.Module, parts: ModelParts, generator: torch.Generator, tell: Callable[[str], None]
    ):
        self.calls, self.config, self.layers = parts.calls, text_config(reference), parts.layers
        self.generator, self.tell, self.streams, self.loop = generator, tell, parts.streams, parts.loop
        self.usual: Mapping[str, Candidate] = {}
        self.attempts: dict[str, list[Attempt]] = {}
        self.known: dict[tuple, Attempt | None] = {}
        self.unproven: dict[str, Unproven] = {}
        self.contradictions: dict[str, str] = {}
        self.again: Again | None = None

    @contextlib.contextmanager
    def seeing(self, calls: dict[str, Call], again: Again | None = None) -> Iterator[None]:
        """With the calls of one pass over layers that run several times."""
        before = self.calls, self.again
        self.calls, self.again = calls, again
        try:
            yield
        finally:
            self.calls, self.again = before

    def best(
        self, roles: tuple[str, ...], path: str, signature: tuple, joined: bool = False, call: Call | None = None
    ) -> Attempt | None:
        """The best block for the module at `path`; None, with the reason in `unproven`, where there is none.

        call: the module as another function of its arguments than of the first one.
        """
        key = (roles, signature)
        if key not in self.known:
            self.tell(f"proving {path}")
            site = site_of(self.calls, path if call is None else call.path, self.config)
            site.call = call or replace(site.call, joined=joined)
            attempts: list[Attempt] = []
            survivors: list[Attempt] = []
            if path in self.usual:
                claim = refitted_to(self.usual[path], site)
                attempts = [attempt(claim, site, self.generator, thorough=True, gains=())]
                survivors = [tried for tried in attempts if tried.proven]
            for role in () if survivors else roles:
                verdict = prove(role, site, self.generator)
                attempts += verdict.attempts
                survivors = survivors or verdict.survivors
                if survivors:
                    break
            self.attempts[path] = attempts
            self.known[key] = survivors[0] if survivors else None
            if not survivors:
                nearest = sorted(attempts, key=lambda attempt: (not attempt.thorough, attempt.error))[:3]
                tried = [f"{a.candidate.block}: {a.objection}" for a in nearest]
                kind = type(self.calls[path].module).__name__
                why = f"no block reproduces {kind}" if tried else f"no block here is like {kind}"
                if "ffn" in roles and (wrong := _contradiction(site)):
                    self.contradictions[path] = why = wrong
                self.unproven[path] = Unproven(path, why, tried)
        return self.known[key]

    def beside(self, layer: str, wiring: LayerParts) -> str:
        """What a layer of which modules were looked into does beside the sums of its wiring; "" for nothing."""
        paths = (f"{layer}.{unit.path}".rpartition(".")[0] for unit in wiring.units)
        if not any(path in self.calls for path in paths if path != layer):
            return ""
        return objection(self.calls, layer, wiring, self.config, self.generator)

    def lifted(
        self,
        path: str,
        signature: tuple,
        replace: Mapping[str, Candidate] | None = None,
        call: Call | None = None,
    ) -> Attempt | None:
        """The module's own code, copied, where that is proven to do the same; None, with the reason in `unproven`.

        replace: paths inside it -> what stands there instead.
        """
        key = (("lifted", *sorted(replace or {})), signature)
        if key not in self.known:
            self.tell(f"lifting {path}")
            site = site_of(self.calls, path, self.config)
            site.call = call or site.call
            made, attempts, why = prove_lifted(site, replace or {}, self.generator)
            self.attempts.setdefault(path, []).extend(attempts)
            self.known[key] = made
            if made is None:
                before = self.unproven.get(path)
                tried = [*(before.tried if before else []), *(f"{a.candidate.block}: {a.objection}" for a in attempts)]
                reason = f"{before.why}, and its own code cannot stand by itself: {why}" if before else why
                self.unproven[path] = Unproven(path, reason, tried[-3:])
        return self.known[key]


def _contradiction(site: Site) -> str | None:
    """What is wrong with the reference itself, where that can be said: no block is fitted to it, and of its own code,
    copied, it is told."""
    with contextlib.suppress(RuntimeError, ValueError, IndexError, KeyError):
        return contradiction(site)
    return None


def prove_model(
    reference: nn.Module,
    ids: torch.Tensor,
    generator: torch.Generator,
    tell: Callable[[str], None] = lambda line: None,
    usual: Mapping[str, Candidate] | None = None,
) -> tuple[Proven, dict[str, list[Attempt]]]:
    """Every distinct block of the reference, proven, and all attempts by module path. Raises NotProven.

    usual: path -> a claim that held for a model like this one; it is tried before anything is searched for.
    """
    try:
        parts = discover(reference, ids)
    except Undiscovered as error:
        raise NotProven([Unproven("structure", str(error))]) from None
    prover = _Prover(reference, parts, generator, tell)
    prover.usual = usual or {}
    rotaries = Rotaries(parts.calls, prover.config)
    signatures = layer_signatures(reference)
    unproven: list[Unproven] = []
    layers = _prove_layers(prover, rotaries, parts.layers, signatures, unproven, parts.loop)
    loop = prove_loop(prover, reference, ids, layers, signatures, unproven)
    positions = _positions(prover, parts.positions, ids, unproven)
    encoder = None if parts.encoder is None else _prove_encoder(prover, rotaries, reference, parts, ids, unproven)
    # Where no norm follows, the head reads what makes one stream of several.
    merges = parts.streams > 1 and parts.merge is None
    last = as_streams(parts.calls[parts.norm], parts.streams) if merges else None
    norm = prover.best(("merge",) if merges else ("norm",), parts.norm, ("final norm",), call=last)
    embed_norm = (
        prover.best(("norm",), parts.embed_norm, ("embedding norm",))
        if parts.embed_norm is not None and not parts.embed_affine
        else _affine(parts)
    )
    merge = prover.best(("merge",), parts.merge, ("merge",), call=parts.merge_call) if parts.merge else None
    query_scale = _query_scale(prover, reference, layers, unproven)
    layer_inputs = _layer_inputs(prover, ids, layers, unproven)
    outside = [path for path in (parts.norm, parts.embed_norm, parts.merge) if path in prover.unproven]
    unproven += [prover.unproven[path] for path in outside]
    tables = "no formula here gives the rotary tables that a layer is handed"
    unproven += [Unproven(path, tables) for path in dict.fromkeys(rotaries.without)]
    if unproven or norm is None:
        raise NotProven(unproven)
    keeps_first = _reads_what_was_kept(layers) and not parts.history
    if keeps_first and handed_on(parts.calls, parts.layers) != [0]:
        raise NotProven([Unproven("structure", "layers read the input of one before them that is not the first")])
    head, embed = parts.calls[parts.head].module, parts.calls[parts.embed].module
    proven = Proven(
        parts=parts,
        layers=layers,
        norm=norm,
        embed_norm=embed_norm,
        rotaries=rotaries.proven,
        query_scale=query_scale,
        layer_inputs=layer_inputs,
        tied=head.weight is embed.weight,
        embed_scale=explain_factor(parts.embed_scale, embed, prover.config),
        logit_scale=explain_factor(parts.logits.scale, reference, prover.config),
        logit_softcap=_explained(parts.logits.softcap, reference, prover.config),
        logit_rows=_explained(parts.logits.rows, reference, prover.config),
        merge=merge,
        positions=positions,
        encoder=encoder,
        contradictions=prover.contradictions,
        keeps_first=keeps_first,
        loop=loop,
    )
    return proven, prover.attempts


def _prove_layers(
    prover: _Prover,
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


def _positions(prover: _Prover, path: str | None, ids: torch.Tensor, unproven: list[Unproven]) -> Candidate | None:
    """The formula of what is added to the embeddings; None for nothing, or where it stays open."""
    if path is None:
        return None
    found = propose_positions(prover.calls[path], ids, prover.config)
    if found is None:
        unproven.append(Unproven(path, "no formula here gives what it adds to the embeddings"))
    return found


def _prove_encoder(
    prover: _Prover,
    rotaries: Rotaries,
    reference: nn.Module,
    parts: ModelParts,
    ids: torch.Tensor,
    unproven: list[Unproven],
) -> ProvenEncoder | None:
    """The encoder, layer by layer like a decoder; None where something stays open, which is added to `unproven`."""
    held = parts.encoder
    assert held is not None
    signatures = layer_signatures(reference, reference.get_submodule(held.layers))  # type: ignore[arg-type]
    layers = _prove_layers(prover, rotaries, held.layers, signatures, unproven)
    norm = prover.best(("norm",), held.norm, ("last norm of the encoder",))
    if norm is None:
        unproven.append(prover.unproven[held.norm])
        return None
    embed = parts.calls[held.embed].module
    own = embed.weight is not parts.calls[parts.embed].module.weight
    scale = explain_factor(held.embed_scale, embed, prover.config)
    positions = _positions(prover, held.positions, ids, unproven)
    return ProvenEncoder(held, layers, signatures, norm, own, scale, positions)


def _prove_or_lift_layer(prover: _Prover, rotaries: Rotaries, layer: str, signature: Any) -> ProvenLayer:
    """The layer by its parts; as its own code with proven blocks inside, where its wiring is no sum of parts."""
    try:
        return _prove_layer(prover, rotaries, layer, signature)
    except NotProven as error:
        call = prover.calls[layer]
        inside: dict[str, Candidate] = {}
        for path, role in parts_of(prover.calls, layer).items():
            key = (role, part_signature(signature, path), _handed(prover.calls[f"{layer}.{path}"]))
            if (attempt := prover.best(_PROPOSE_AS[role], f"{layer}.{path}", key)) is not None:
                inside[path] = attempt.candidate
        attempt = prover.lifted(layer, ("layer", signature, _handed(call)), inside)
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


def _prove_layer(prover: _Prover, rotaries: Rotaries, layer: str, signature: Any) -> ProvenLayer:
    """The layer's wiring and a block for each of its units; a unit that no block explains is looked into, and where
    nothing inside explains it, its own code is copied.

    Raises NotProven with what stays open, of the coarsest wiring.
    """
    if has_streams(prover.calls[layer], prover.streams):
        return _prove_stream_layer(prover, rotaries, layer, signature)
    expanded: set[str] = set()
    first: list[Unproven] = []
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
        first = first or [
            prover.unproven.get(f"{layer}.{path}") or Unproven(f"{layer}.{path}", "no block reproduces it")
            for path in open_units
        ]
        first = first or [Unproven(layer, f"it {beside}")]
        expandable = {path for path in open_units if len(list(prover.calls[f"{layer}.{path}"].module.children())) > 1}
        if not expandable:
            break
        expanded |= expandable
    for wiring in reversed(wirings):  # the finest first: as little as possible is copied
        proven, open_units = _prove_units(prover, rotaries, layer, signature, wiring, lift=True)
        if not open_units and not prover.beside(layer, wiring):
            return _proven_layer(prover, layer, proven, wiring)
    raise NotProven(first)


def _proven_layer(prover: _Prover, layer: str, parts: list[ProvenPart], wiring: LayerParts) -> ProvenLayer:
    return ProvenLayer(parts, _factors(wiring.gives, prover, layer), _factors(wiring.keeps or {}, prover, layer))


def _prove_units(
    prover: _Prover, rotaries: Rotaries, layer: str, signature: Any, wiring: LayerParts, lift: bool
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
        key = (unit.role, len(unit.inputs), own, _handed(call or prover.calls[path]))
        roles = _PROPOSE_AS[unit.role] if len(unit.inputs) == 1 else ("mixer of several", "join")
        attempt = prover.best(roles, path, key, call=call)
        if attempt is None and lift and unit.role not in {"routing", "chain"}:
            attempt = prover.lifted(path, key, call=call)
        if attempt is None:
            open_units.append(unit.path)
            continue
        tables = rotaries.indices(prover.calls[path]) if uses_tables(attempt.candidate) else []
        more = [_factors(terms, prover, layer) for terms in unit.more]
        proven.append(ProvenPart(unit, attempt, _factors(unit.reads, prover, layer), tables, more))
    return proven, open_units


def _prove_stream_layer(prover: _Prover, rotaries: Rotaries, layer: str, signature: Any) -> ProvenLayer:
    """A layer between several streams: each block with the connection that feeds it, as one part."""
    try:
        wiring = stream_layer(prover.calls, layer, prover.streams)
    except Undiscovered as error:
        raise NotProven([Unproven("structure", str(error))]) from None
    parts: list[ProvenPart] = []
    unproven: list[Unproven] = []
    reads = {"x": 1.0}
    for item in wiring:
        held: dict[str, Attempt] = {}
        inner = {"connection": item.connection, "norm": item.norm, "block": item.block}
        wanted = {name: path for name, path in inner.items() if path is not None}
        for name, child in wanted.items():
            path = f"{layer}.{child}"
            key = (name, part_signature(signature, child), _handed(prover.calls[path]))
            call = as_streams(prover.calls[path], prover.streams) if name == "connection" else None
            roles = () if item.connection is None else (item.name if name == "block" else name,)
            attempt = prover.best(roles, path, key, call=call)
            if attempt is None and item.connection is None:
                attempt = prover.lifted(path, key)
            if attempt is None:
                unproven.append(prover.unproven.get(path) or Unproven(path, "no block reproduces it"))
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
            chosen = replace(worst, candidate=Candidate("HyperConnected", {**inside, **none}, {}))
            unit = Unit(item.name, "", item.name, reads)
            reads = {item.name: 1.0}
        uses = uses_tables(chosen.candidate)
        tables = rotaries.indices(prover.calls[f"{layer}.{item.block}"]) if uses else []
        parts.append(ProvenPart(unit, chosen, _factors(unit.reads, prover, layer), tables))
    if unproven:
        raise NotProven(unproven)
    return ProvenLayer(parts, _factors(reads, prover, layer))


def _reads_what_was_kept(layers: list[ProvenLayer]) -> bool:
    inputs = [terms for layer in layers for part in layer.parts for terms in (part.factors, *part.more)]
    sums = [*inputs, *(layer.gives for layer in layers)]
    return any(term.partition(".")[0] == PAST for terms in sums for term in terms)


def _affine(parts: ModelParts) -> Attempt | None:
    """Vectors beside the embedding that shift and scale its rows, as a block: finding them has proven it."""
    if not parts.embed_affine:
        return None
    sources = {role: Stored(name) for role, name in parts.embed_affine.items()}
    return Attempt(Candidate("Affine", {"width": size(parts.embed_affine["weight"], 0)}, sources), 0.0, "wiring")


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


def _agree(layers: list[ProvenLayer], prover: _Prover, path: str) -> None:
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


def _explained(value: float | None, reference: nn.Module, config: Any) -> Evidence | None:
    return None if value is None else explain_factor(value, reference, config)


def _factors(reads: Mapping[str, float], prover: _Prover, layer: str) -> dict[str, Evidence]:
    module = prover.calls[layer].module
    return {name: explain_factor(factor, module, prover.config) for name, factor in reads.items()}


def _layer_inputs(
    prover: _Prover, ids: torch.Tensor, layers: list[ProvenLayer], unproven: list[Unproven]
) -> Candidate | None:
    """What makes the inputs that the model hands to its layers one by one, where one of them reads such."""
    blocks = [part.attempt.candidate.block for layer in layers for part in layer.parts]
    if "GatedLayerInput" not in blocks:
        return None

    def norm_at(path: str) -> Candidate | None:
        found = prover.best(("norm",), path, ("norm of layer inputs", path))
        return None if found is None else found.candidate

    found = find_layer_inputs(prover.calls, prover.layers, ids, prover.config, norm_at)
    if found is None:
        unproven.append(Unproven(prover.layers, "no formula here gives what each layer is handed beside the stream"))
    return found


def _query_scale(
    prover: _Prover, reference: nn.Module, layers: list[ProvenLayer], unproven: list[Unproven]
) -> Candidate | None:
    """The formula of the factors by position that the model hands to its layers, where one of them reads such."""
    for index, layer in enumerate(layers):
        for part in layer.parts:
            handed = part.attempt.candidate.arguments.get("query_scale")
            path = f"{prover.layers}.{index}.{part.path}"
            if isinstance(handed, Evidence) and handed.resolve(prover.calls[path].module, prover.config) == "handed":
                call = prover.calls[path]
                factors = query_scale_of(call)
                position = context_of(call).position
                found = None
                if factors is not None:
                    found = propose_position_scale(factors, position, reference, prover.config)
                if found is None:
                    unproven.append(Unproven(path, "no formula here gives the factors by position that it is handed"))
                return found
    return None


def _handed(call: Call) -> tuple[str, ...]:
    """Digests of the tensors that a module is handed beside its hidden input, such as its mask."""
    inputs = call.inputs
    others = [held for held in tensors((call.args, call.kwargs)) if not any(held is one for one in inputs)]
    return tuple(hashlib.sha256(tensor.detach().resolve_conj().numpy().tobytes()).hexdigest() for tensor in others)
