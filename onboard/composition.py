"""The reference taken apart into proven blocks, and put together again from ours."""

import contextlib
import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from dayzero.onboard.align.ladder import rounded_up
from dayzero.onboard.between_parts import objection
from dayzero.onboard.calls import Call, Undiscovered, tensors
from dayzero.onboard.candidates import Candidate, Evidence, Site, site_of
from dayzero.onboard.candidates.evidence import literal, size
from dayzero.onboard.candidates.factor import explain_factor
from dayzero.onboard.candidates.lifted import LiftedCandidate
from dayzero.onboard.candidates.position_scale import propose_position_scale
from dayzero.onboard.candidates.rotary import TOLERANCE as ROTARY_TOLERANCE
from dayzero.onboard.candidates.rotary import ProposedRotary, propose_rotaries
from dayzero.onboard.candidates.routing import routing_call
from dayzero.onboard.contradiction import contradiction
from dayzero.onboard.discover import ModelParts, discover
from dayzero.onboard.handed import Table, context_of, handed_tables
from dayzero.onboard.handed import query_scale as query_scale_of
from dayzero.onboard.layer_wiring import LayerParts, Unit, layer_parts
from dayzero.onboard.lift import merge as merged_source
from dayzero.onboard.lifting import parts_of, prove_lifted
from dayzero.onboard.prove import Attempt, attempt, prove
from dayzero.onboard.reference import state_of, text_config
from dayzero.onboard.shrink import layer_signatures, part_signature
from dayzero.onboard.stream_wiring import as_streams, has_streams, stream_layer
from dayzero.runtime.nn import BLOCKS
from dayzero.runtime.nn.wiring import text_of_inputs
from dayzero.runtime.spec import BlockSpec, CheckpointId, LayerKind, LayerRun, ModelSpec, PartSpec, Proof
from dayzero.runtime.weights import Stored

# What may stand for a unit, by the role that its call shows.
_PROPOSE_AS = {
    "norm": ("norm", "ffn"),
    "mixer": ("mixer",),
    "ffn": ("ffn", "norm"),
    "join": ("join",),
    "routing": ("routing",),
}


@dataclass
class Unproven:
    """One thing that stands between a checkpoint and its adapter. tried: the nearest candidates and their misses."""

    where: str
    why: str
    tried: list[str] = field(default_factory=list)


class NotProven(Exception):
    """The checkpoint is beyond what can be proven; nothing may be generated."""

    def __init__(self, unproven: list[Unproven]):
        self.unproven = unproven
        super().__init__("; ".join(f"{item.where}: {item.why}" for item in unproven))


@dataclass
class ProvenPart:
    """A unit of a layer and what stands for it. factors: of what it reads, by name. tables: for each pair of rotary
    tables that the reference hands it, which of the model's it is. more: of what it reads beside that."""

    unit: Unit
    attempt: Attempt
    factors: dict[str, Evidence]
    tables: list[int]
    more: list[dict[str, Evidence]] = field(default_factory=list)

    @property
    def path(self) -> str:
        """Relative to the layer, the module that the block stands for: the layer itself where that owns a scale."""
        return "" if self.unit.role == "scale" else self.unit.path


@dataclass
class ProvenLayer:
    """The parts of a layer in order, and the sum it gives. keeps: what it keeps for later layers."""

    parts: list[ProvenPart]
    gives: dict[str, Evidence]
    keeps: dict[str, Evidence] = field(default_factory=dict)

    @property
    def attempts(self) -> dict[str, Attempt]:
        """Part name -> what stands for it."""
        return {part.unit.name: part.attempt for part in self.parts}


@dataclass
class ProvenRotary:
    """A formula that gives tables of the model, and the module of the reference that makes them."""

    path: str
    candidate: Candidate


@dataclass
class Proven:
    """What holds for the shrunk model."""

    parts: ModelParts
    layers: list[ProvenLayer]
    norm: Attempt
    embed_norm: Attempt | None
    rotaries: list[ProvenRotary]
    query_scale: Candidate | None
    tied: bool
    embed_scale: Evidence
    logit_scale: Evidence
    logit_softcap: Evidence | None
    logit_rows: Evidence | None
    merge: Attempt | None = None

    @property
    def candidates(self) -> list[Candidate]:
        """Everything that was proven, layers first."""
        layers = [part.attempt.candidate for layer in self.layers for part in layer.parts]
        outside = [attempt.candidate for attempt in (self.norm, self.embed_norm, self.merge) if attempt is not None]
        return [*layers, *outside]

    @property
    def claims(self) -> dict[str, Candidate]:
        """Path -> what was proven for the module there."""
        parts = self.parts
        found = {parts.norm: self.norm.candidate}
        for index, layer in enumerate(self.layers):
            for part in layer.parts:
                if part.path:
                    found[f"{parts.layers}.{index}.{part.path}"] = part.attempt.candidate
        return found


class _Prover:
    """Proves modules of one reference, each distinct one once. usual: path -> the claim to try before any search."""

    def __init__(
        self, reference: nn.Module, parts: ModelParts, generator: torch.Generator, tell: Callable[[str], None]
    ):
        self.calls, self.config, self.layers = parts.calls, text_config(reference), parts.layers
        self.generator, self.tell, self.streams = generator, tell, parts.streams
        self.usual: Mapping[str, Candidate] = {}
        self.attempts: dict[str, list[Attempt]] = {}
        self.known: dict[tuple, Attempt | None] = {}
        self.unproven: dict[str, Unproven] = {}

    def best(
        self, roles: tuple[str, ...], path: str, signature: tuple, joined: bool = False, call: Call | None = None
    ) -> Attempt | None:
        """The best block for the module at `path`; None, with the reason in `unproven`, where there is none.

        call: the module as another function of its arguments than of the first one.
        """
        key = (roles, signature)
        if key not in self.known:
            self.tell(f"proving {path}")
            site = site_of(self.calls, path, self.config)
            site.call = call or replace(site.call, joined=joined)
            attempts: list[Attempt] = []
            survivors: list[Attempt] = []
            if path in self.usual:
                attempts = [attempt(self.usual[path], site, self.generator, thorough=True, gains=())]
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
                    raise NotProven([Unproven(path, wrong, tried)])
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
    """What is wrong with the reference itself, where that can be said: it is neither fitted nor copied."""
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
    rotaries = _Rotaries(parts, prover.config)
    signatures = layer_signatures(reference)
    layers: list[ProvenLayer] = []
    unproven: list[Unproven] = []
    for index in range(parts.count):
        try:
            layers.append(_prove_or_lift_layer(prover, rotaries, f"{parts.layers}.{index}", signatures[index]))
        except NotProven as error:
            unproven += [item for item in error.unproven if item not in unproven]
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
    outside = [path for path in (parts.norm, parts.embed_norm, parts.merge) if path in prover.unproven]
    unproven += [prover.unproven[path] for path in outside] + rotaries.unproven
    if unproven or norm is None:
        raise NotProven(unproven)
    head, embed = parts.calls[parts.head].module, parts.calls[parts.embed].module
    proven = Proven(
        parts=parts,
        layers=layers,
        norm=norm,
        embed_norm=embed_norm,
        rotaries=rotaries.proven,
        query_scale=query_scale,
        tied=head.weight is embed.weight,
        embed_scale=explain_factor(parts.embed_scale, embed, prover.config),
        logit_scale=explain_factor(parts.logits.scale, reference, prover.config),
        logit_softcap=_explained(parts.logits.softcap, reference, prover.config),
        logit_rows=_explained(parts.logits.rows, reference, prover.config),
        merge=merge,
    )
    return proven, prover.attempts


def _prove_or_lift_layer(prover: _Prover, rotaries: "_Rotaries", layer: str, signature: Any) -> ProvenLayer:
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
            raise NotProven(_with_own_code(error.unproven, prover.unproven[layer])) from None
        unit = Unit("layer", "", "layer", {"x": 1.0})
        tables = rotaries.indices(call) if _uses_tables(attempt.candidate) else []
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


def _prove_layer(prover: _Prover, rotaries: "_Rotaries", layer: str, signature: Any) -> ProvenLayer:
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
            wirings.append(layer_parts(prover.calls, layer, expanded))
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
    prover: _Prover, rotaries: "_Rotaries", layer: str, signature: Any, wiring: LayerParts, lift: bool
) -> tuple[list[ProvenPart], list[str]]:
    """The units of a wiring that are proven, and the paths of those that are not. lift: copied where no block is."""
    open_units: list[str] = []
    proven: list[ProvenPart] = []
    for unit in wiring.units:
        if unit.role == "scale":
            proven.append(ProvenPart(unit, _scale(unit), _factors(unit.reads, prover, layer), []))
            continue
        path = f"{layer}.{unit.path}"
        call = unit.call if unit.role != "routing" else routing_call(prover.calls[path], unit.classes)
        key = (unit.role, part_signature(signature, unit.path), _handed(call or prover.calls[path]))
        roles = _PROPOSE_AS[unit.role] if len(unit.inputs) == 1 else ("mixer of several", "join")
        attempt = prover.best(roles, path, key, call=call)
        if attempt is None and lift and unit.role != "routing":
            attempt = prover.lifted(path, key, call=call)
        if attempt is None:
            open_units.append(unit.path)
            continue
        tables = rotaries.indices(prover.calls[path]) if _uses_tables(attempt.candidate) else []
        more = [_factors(terms, prover, layer) for terms in unit.more]
        proven.append(ProvenPart(unit, attempt, _factors(unit.reads, prover, layer), tables, more))
    return proven, open_units


def _prove_stream_layer(prover: _Prover, rotaries: "_Rotaries", layer: str, signature: Any) -> ProvenLayer:
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
        uses = _uses_tables(chosen.candidate)
        tables = rotaries.indices(prover.calls[f"{layer}.{item.block}"]) if uses else []
        parts.append(ProvenPart(unit, chosen, _factors(unit.reads, prover, layer), tables))
    if unproven:
        raise NotProven(unproven)
    return ProvenLayer(parts, _factors(reads, prover, layer))


def _affine(parts: ModelParts) -> Attempt | None:
    """Vectors beside the embedding that shift and scale its rows, as a block: finding them has proven it."""
    if not parts.embed_affine:
        return None
    sources = {role: Stored(name) for role, name in parts.embed_affine.items()}
    return Attempt(Candidate("Affine", {"width": size(parts.embed_affine["weight"], 0)}, sources), 0.0, "wiring")


def _scale(unit: Unit) -> Attempt:
    """A vector that the layer owns, as a block: solving the wiring has proven it."""
    width = Evidence(f"size of {unit.path}", lambda layer, config: getattr(layer, unit.path).numel())
    return Attempt(Candidate("ChannelScale", {"width": width}, {"weight": Stored(unit.path)}), 0.0, "wiring")


def _explained(value: float | None, reference: nn.Module, config: Any) -> Evidence | None:
    return None if value is None else explain_factor(value, reference, config)


def _factors(reads: Mapping[str, float], prover: _Prover, layer: str) -> dict[str, Evidence]:
    module = prover.calls[layer].module
    return {name: explain_factor(factor, module, prover.config) for name, factor in reads.items()}


class _Rotaries:
    """The rotary tables that layers are handed or make, each with the formula that gives it."""

    def __init__(self, parts: ModelParts, config: Any):
        self.calls = parts.calls
        self.found, self.open = propose_rotaries(parts.calls, config)
        self.used: list[ProposedRotary] = []
        self.unproven: list[Unproven] = []

    @property
    def proven(self) -> list[ProvenRotary]:
        return [ProvenRotary(rotary.path, rotary.candidate) for rotary in self.used]

    def indices(self, call: Call) -> list[int]:
        """Which of the model's tables each one is that the call was handed, in the order of its `Context.tables`."""
        prefix = call.path + "."
        inner = {path: made for path, made in self.calls.items() if path.startswith(prefix)}
        return [self._index(table) for table in handed_tables(call, inner)]

    def _index(self, table: Table) -> int:
        rotary = next((item for item in self.found if item.gives(table)), None)
        if rotary is None:
            path = (self.open or ["rotary"])[0]
            self.unproven.append(Unproven(path, "no formula here gives the rotary tables that a layer is handed"))
            return 0
        if rotary not in self.used:
            self.used.append(rotary)
        return self.used.index(rotary)


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


def _query_scale_block(proven: Proven, model: nn.Module, config: Any) -> BlockSpec | None:
    if proven.query_scale is None:
        return None
    proof = Proof(status="proven", module="", error=ROTARY_TOLERANCE, evidence=proven.query_scale.describe())
    return proven.query_scale.spec(model, config).model_copy(update={"proof": proof})


def _handed(call: Call) -> tuple[str, ...]:
    """Digests of the tensors that a module is handed beside its hidden input, such as its mask."""
    inputs = call.inputs
    others = [held for held in tensors((call.args, call.kwargs)) if not any(held is one for one in inputs)]
    return tuple(hashlib.sha256(tensor.detach().resolve_conj().numpy().tobytes()).hexdigest() for tensor in others)


def specification_of(
    model: nn.Module, config: Any, proven: Proven, follows: list[int], identity: CheckpointId, name: str
) -> ModelSpec:
    """The specification of `model`, whose layer i is like the shrunk layer follows[i]; without weight rules."""
    parts = proven.parts
    kinds: list[LayerKind] = []
    runs: list[LayerRun] = []
    for index, shrunk in enumerate(follows):
        kind = _layer_kind(model, config, proven, shrunk, index)
        if kind not in kinds:
            kinds.append(kind)
        number = kinds.index(kind)
        if runs and runs[-1].kind == number:
            runs[-1] = runs[-1].model_copy(update={"count": runs[-1].count + 1})
        else:
            runs.append(LayerRun(first=index, count=1, kind=number))
    embed, head = model.get_submodule(parts.embed), model.get_submodule(parts.head)
    rotaries = []
    for rotary in proven.rotaries:
        evidence = rotary.candidate.describe()
        proof = Proof(status="proven", module=rotary.path, error=ROTARY_TOLERANCE, evidence=evidence)
        block = rotary.candidate.spec(model.get_submodule(rotary.path), config)
        rotaries.append(block.model_copy(update={"proof": proof}))
    embed_norm = None
    if proven.embed_norm is not None and parts.embed_norm is not None:
        where = f"{parts.embed_norm}." if parts.embed_affine else parts.embed_norm
        embed_norm = _block(proven.embed_norm, model.get_submodule(parts.embed_norm), config, where)
    merge = None
    if proven.merge is not None and parts.merge is not None:
        merge = _block(proven.merge, model.get_submodule(parts.merge), config, parts.merge)
    return ModelSpec(
        name=name,
        checkpoint=identity,
        vocabulary=embed.weight.shape[0],  # type: ignore[union-attr]
        hidden=embed.weight.shape[1],  # type: ignore[union-attr]
        tied=proven.tied,
        rotaries=rotaries,
        query_scale=_query_scale_block(proven, model, config),
        embed_scale=proven.embed_scale.resolve(embed, config),
        embed_norm=embed_norm,
        head_bias=getattr(head, "bias", None) is not None,
        logit_scale=proven.logit_scale.resolve(model, config),
        logit_softcap=proven.logit_softcap.resolve(model, config) if proven.logit_softcap else None,
        logit_rows=int(proven.logit_rows.resolve(model, config)) if proven.logit_rows else None,
        streams=_streams(proven, model, config),
        history=parts.history,
        head_rows=_head_rows(embed, head),
        merge=merge,
        layer_kinds=kinds,
        layers=runs,
        norm=_block(proven.norm, model.get_submodule(parts.norm), config, parts.norm),
        lifted=merged_source(made for candidate in proven.candidates for made in candidate.lifts),
        rules=[],
        initializer_range=float(getattr(config, "initializer_range", None) or 0.02),
        max_positions=getattr(config, "max_position_embeddings", None),
    )


def _head_rows(embed: nn.Module, head: nn.Module) -> int | None:
    """Rows of a head that has others than the embedding."""
    rows = head.weight.shape[0]  # type: ignore[union-attr, index]
    return None if rows == embed.weight.shape[0] else rows  # type: ignore[union-attr, index]


def _streams(proven: Proven, model: nn.Module, config: Any) -> int:
    """How many copies of the embeddings the layers pass on, as the first layer's connection has it."""
    if proven.parts.streams == 1:
        return 1
    held = (part.attempt.candidate.arguments.get("connection") for part in proven.layers[0].parts)
    connection = next(argument for argument in held if argument is not None)
    spec = connection.resolve(model.get_submodule(f"{proven.parts.layers}.0"), config)
    return spec.arguments["streams"]  # type: ignore[union-attr]


def _layer_kind(model: nn.Module, config: Any, proven: Proven, shrunk: int, index: int) -> LayerKind:
    """The kind of layer `index` of `model`, which is like the shrunk layer `shrunk`."""
    layer = model.get_submodule(f"{proven.parts.layers}.{index}")

    def sum_text(*sums: Mapping[str, Evidence]) -> str:
        resolved = [{name: evidence.resolve(layer, config) for name, evidence in terms.items()} for terms in sums]
        return text_of_inputs(resolved)

    held = []
    for part in proven.layers[shrunk].parts:
        where = f"{proven.parts.layers}.{{layer}}.{part.unit.path}".rstrip(".")
        block = _block(part.attempt, layer.get_submodule(part.path), config, where)
        block = _with_tables(block, part.tables)
        held.append(PartSpec(name=part.unit.name, block=block, reads=sum_text(part.factors, *part.more)))
    like = proven.layers[shrunk]
    return LayerKind(parts=held, gives=sum_text(like.gives), keeps=sum_text(like.keeps) if like.keeps else "")


def _uses_tables(candidate: Candidate) -> bool:
    """Whether the block, or one inside it, reads rotary tables."""
    if isinstance(candidate, LiftedCandidate):
        return candidate.reads_tables or any(map(_uses_tables, candidate.replace.values()))
    inner = [argument for argument in candidate.arguments.values() if isinstance(argument, Candidate)]
    return "table" in _arguments(candidate.block) or any(map(_uses_tables, inner))


def _with_tables(block: BlockSpec, tables: list[int]) -> BlockSpec:
    """The block and those inside it, reading the model's rotary tables instead of the ones it was handed."""

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: renamed(held) for name, held in value.items()}
        return _with_tables(value, tables) if isinstance(value, BlockSpec) else value

    arguments = {name: renamed(value) for name, value in block.arguments.items()}
    if tables and block.block == "Lifted":
        arguments["tables"] = [tables[number] for number in arguments["tables"]]
    if tables and "table" in _arguments(block.block):
        arguments["table"] = tables[arguments.get("table", 0)]
    return block.model_copy(update={"arguments": arguments})


def _arguments(block: str) -> Collection[str]:
    """Names of the arguments of a block's constructor."""
    return inspect.signature(BLOCKS[block].__init__).parameters


def _block(attempt: Attempt, module: nn.Module, config: Any, path: str) -> BlockSpec:
    spec = attempt.candidate.spec(module, config)
    proof = Proof(
        status="lifted" if attempt.candidate.lifts else "proven",
        module=path,
        error=max(rounded_up(attempt.error), 1e-12),
        evidence=attempt.candidate.describe(),
    )
    return spec.model_copy(update={"proof": proof})


def load_reference(model: nn.Module, reference: nn.Module, proven: Proven) -> None:
    """Copies the reference's weights into our model of the same sizes, through the proven parameter mappings."""
    parts = proven.parts
    theirs = state_of(reference)
    values = {"embed.weight": theirs[f"{parts.embed}.weight"]}
    if not proven.tied:
        values["head.weight"] = theirs[f"{parts.head}.weight"]
    if f"{parts.head}.bias" in theirs:
        values["head_bias"] = theirs[f"{parts.head}.bias"]
    places = [("norm", parts.norm, proven.norm)]
    if proven.embed_norm is not None:
        places.append(("embed_norm", str(parts.embed_norm), proven.embed_norm))
    if proven.merge is not None:
        places.append(("merge", str(parts.merge), proven.merge))
    for index, layer in enumerate(proven.layers):
        for part in layer.parts:
            path = f"{parts.layers}.{index}.{part.path}".rstrip(".")
            places.append((f"layers.{index}.{part.unit.name}", path, part.attempt))
    for ours, path, held in places:
        prefix = path + "."
        inner = {name.removeprefix(prefix): value for name, value in theirs.items() if name.startswith(prefix)}
        for name, value in held.candidate.values(inner).items():
            values[f"{ours}.{name}"] = value
    model.load_state_dict(values, strict=True)
