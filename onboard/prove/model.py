"""The reference taken apart into proven blocks: its layers, and all that is around them."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from dayzero.onboard.candidates import Candidate, Evidence
from dayzero.onboard.candidates.evidence import size
from dayzero.onboard.candidates.factor import explain_factor
from dayzero.onboard.candidates.position_scale import propose_position_scale
from dayzero.onboard.candidates.positions import propose_positions
from dayzero.onboard.oracle.calls import Undiscovered
from dayzero.onboard.prove.block import Attempt
from dayzero.onboard.prove.layers import prove_layers
from dayzero.onboard.prove.loop import prove_loop
from dayzero.onboard.prove.proven import NotProven, Proven, ProvenEncoder, ProvenLayer, Unproven
from dayzero.onboard.prove.prover import Prover
from dayzero.onboard.prove.rotary_tables import Rotaries
from dayzero.onboard.shrink.shrink import layer_signatures
from dayzero.onboard.structure.discover import ModelParts, discover
from dayzero.onboard.structure.handed import context_of
from dayzero.onboard.structure.handed import query_scale as query_scale_of
from dayzero.onboard.structure.kept_inputs import handed_on
from dayzero.onboard.structure.layer_inputs import find_layer_inputs
from dayzero.onboard.structure.stream_wiring import as_streams
from dayzero.runtime.nn.wiring import PAST
from dayzero.runtime.weights import Stored


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
    prover = Prover(reference, parts, generator, tell)
    prover.usual = usual or {}
    rotaries = Rotaries(parts.calls, prover.config)
    signatures = layer_signatures(reference)
    unproven: list[Unproven] = []
    layers = prove_layers(prover, rotaries, parts.layers, signatures, unproven, parts.loop)
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


def _positions(prover: Prover, path: str | None, ids: torch.Tensor, unproven: list[Unproven]) -> Candidate | None:
    """The formula of what is added to the embeddings; None for nothing, or where it stays open."""
    if path is None:
        return None
    found = propose_positions(prover.calls[path], ids, prover.config)
    if found is None:
        unproven.append(Unproven(path, "no formula here gives what it adds to the embeddings"))
    return found


def _prove_encoder(
    prover: Prover,
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
    layers = prove_layers(prover, rotaries, held.layers, signatures, unproven)
    norm = prover.best(("norm",), held.norm, ("last norm of the encoder",))
    if norm is None:
        unproven.append(prover.unproven[held.norm])
        return None
    embed = parts.calls[held.embed].module
    own = embed.weight is not parts.calls[parts.embed].module.weight
    scale = explain_factor(held.embed_scale, embed, prover.config)
    positions = _positions(prover, held.positions, ids, unproven)
    return ProvenEncoder(held, layers, signatures, norm, own, scale, positions)


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


def _explained(value: float | None, reference: nn.Module, config: Any) -> Evidence | None:
    return None if value is None else explain_factor(value, reference, config)


def _layer_inputs(
    prover: Prover, ids: torch.Tensor, layers: list[ProvenLayer], unproven: list[Unproven]
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
    prover: Prover, reference: nn.Module, layers: list[ProvenLayer], unproven: list[Unproven]
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
