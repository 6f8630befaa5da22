"""The proven parts put together: the model as data, of the shrunk reference or of the real one, and its weights."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from dayzero.onboard.align.ladder import rounded_up
from dayzero.onboard.candidates import Candidate, Evidence
from dayzero.onboard.candidates.equality import CLOSE
from dayzero.onboard.candidates.refit import refitted
from dayzero.onboard.candidates.rotary import TOLERANCE as ROTARY_TOLERANCE
from dayzero.onboard.idle_leaves import taken_by, without_idle_leaves
from dayzero.onboard.lift.closure import merge as merged_source
from dayzero.onboard.oracle.reference import state_of
from dayzero.onboard.prove.block import Attempt
from dayzero.onboard.prove.proven import Proven, ProvenEncoder, ProvenLayer, ProvenPart
from dayzero.onboard.prove.rotary_tables import with_tables
from dayzero.onboard.sharing import SharedParts, first_name, shared_name, shared_sets
from dayzero.onboard.shrink.layers import alike, layer_signatures
from dayzero.onboard.structure.chains import ChainCall
from dayzero.runtime.nn.wiring import text_of_inputs
from dayzero.runtime.spec import (
    AgainSpec,
    BlockSpec,
    CheckpointId,
    EncoderSpec,
    LayerKind,
    LayerRun,
    LoopSpec,
    ModelSpec,
    PartSpec,
    Proof,
    StepSpec,
)


def specification_of(
    model: nn.Module, config: Any, proven: Proven, follows: list[int], identity: CheckpointId, name: str
) -> ModelSpec:
    """The specification of `model`, whose layer i is like the shrunk layer follows[i]; without weight rules."""
    parts = proven.parts
    kinds: list[LayerKind] = []
    sets = shared_sets(model, proven, follows)
    runs = _runs(model, config, parts.layers, proven.layers, follows, kinds, sets, proven.keeps_first)
    encoder = None if proven.encoder is None else _encoder(model, config, proven.encoder, kinds)
    embed, head = model.get_submodule(parts.embed), model.get_submodule(parts.head)
    rotaries = [_formula(held.candidate, model, config, held.path, ROTARY_TOLERANCE) for held in proven.rotaries]
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
        layer_inputs=_layer_inputs_block(proven, model, config),
        embed_scale=proven.embed_scale.resolve(embed, config),
        embed_norm=embed_norm,
        head_bias=getattr(head, "bias", None) is not None,
        logit_scale=proven.logit_scale.resolve(model, config),
        logit_softcap=proven.logit_softcap.resolve(model, config) if proven.logit_softcap else None,
        logit_rows=int(proven.logit_rows.resolve(model, config)) if proven.logit_rows else None,
        streams=_streams(proven, model, config),
        history=parts.history or proven.keeps_first,
        head_rows=_head_rows(embed, head),
        merge=merge,
        positions=_positions(proven.positions, parts.positions, model, config),
        encoder=encoder,
        loop=_loop(model, config, proven, follows),
        layer_kinds=kinds,
        layers=runs,
        shared=[next(run.kind for run in runs if run.shared == number) for number in range(len(sets))],
        norm=_block(proven.norm, model.get_submodule(parts.norm), config, parts.norm),
        lifted=merged_source(made for candidate in proven.candidates for made in candidate.lifts),
        rules=[],
        initializer_range=float(getattr(config, "initializer_range", None) or 0.02),
        max_positions=getattr(config, "max_position_embeddings", None),
    )


def _runs(
    model: nn.Module,
    config: Any,
    path: str,
    layers: list[ProvenLayer],
    follows: list[int],
    kinds: list[LayerKind],
    sets: Sequence[SharedParts] = (),
    keeps_first: bool = False,
) -> list[LayerRun]:
    """The layers of the list at `path`, the i-th like the shrunk layer follows[i] of `layers`; kinds that are new are
    added to `kinds`. sets: the parts that layers share. keeps_first: the first layer hands on its input."""
    runs: list[LayerRun] = []
    taken = taken_by(layers, config)
    for index, shrunk in enumerate(follows):
        which = next((number for number, held in enumerate(sets) if index in held.layers), None)
        shared = () if which is None else sets[which].parts
        kind = without_idle_leaves(_layer_kind(model, config, path, layers[shrunk], index, shared), taken)
        if keeps_first and index == 0:
            kind = kind.model_copy(update={"keeps": "x"})
        if kind not in kinds:
            kinds.append(kind)
        number = kinds.index(kind)
        if runs and (runs[-1].kind, runs[-1].shared) == (number, which):
            runs[-1] = runs[-1].model_copy(update={"count": runs[-1].count + 1})
        else:
            runs.append(LayerRun(first=index, count=1, kind=number, shared=which))
    return runs


def _loop(model: nn.Module, config: Any, proven: Proven, follows: Sequence[int]) -> LoopSpec | None:
    """Which layers run several times: those that are like one that does."""
    if proven.loop is None:
        return None
    looped = [index for index, shrunk in enumerate(follows) if proven.layers[shrunk].again is not None]
    if looped != list(range(looped[0], looped[-1] + 1)):
        raise ValueError(f"layers {looped} run several times, which are not all in a row")
    parts, message = proven.loop.parts, None
    if proven.loop.message is not None:
        where = str(parts.message)
        message = _block(proven.loop.message, model.get_submodule(where), config, where)
    passes = int(proven.loop.passes.resolve(model, config))
    return LoopSpec(first=looped[0], count=len(looped), passes=passes, restarts=parts.restarts, message=message)


def _encoder(model: nn.Module, config: Any, encoder: ProvenEncoder, kinds: list[LayerKind]) -> EncoderSpec:
    parts = encoder.parts
    return EncoderSpec(
        layers=_runs(model, config, parts.layers, encoder.layers, encoder_follows(model, encoder), kinds),
        norm=_block(encoder.norm, model.get_submodule(parts.norm), config, parts.norm),
        own_embedding=encoder.own_embedding,
        embed_scale=encoder.embed_scale.resolve(model.get_submodule(parts.embed), config),
        positions=_positions(encoder.positions, parts.positions, model, config),
    )


def _formula(candidate: Candidate, model: nn.Module, config: Any, path: str, error: float) -> BlockSpec:
    """A block that finding it has proven: it gives what the module at `path` does, to within `error`."""
    proof = Proof(status="proven", module=path, error=error, evidence=candidate.describe())
    return candidate.spec(model.get_submodule(path), config).model_copy(update={"proof": proof})


def _positions(candidate: Candidate | None, path: str | None, model: nn.Module, config: Any) -> BlockSpec | None:
    """What is added to embeddings, as a block."""
    return None if candidate is None or path is None else _formula(candidate, model, config, path, CLOSE)


def encoder_follows(model: nn.Module, encoder: ProvenEncoder) -> list[int]:
    """For every layer of the model's encoder, the shrunk one that it is like."""
    layers = model.get_submodule(encoder.parts.layers)
    return alike(layer_signatures(model, layers), encoder.signatures)  # type: ignore[arg-type]


def _layer_inputs_block(proven: Proven, model: nn.Module, config: Any) -> BlockSpec | None:
    if proven.layer_inputs is None:
        return None
    owner = proven.parts.layers.rpartition(".")[0]
    return _formula(proven.layer_inputs, model, config, owner, ROTARY_TOLERANCE)


def _query_scale_block(proven: Proven, model: nn.Module, config: Any) -> BlockSpec | None:
    if proven.query_scale is None:
        return None
    return _formula(proven.query_scale, model, config, "", ROTARY_TOLERANCE)


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


def _layer_kind(
    model: nn.Module, config: Any, path: str, like: ProvenLayer, index: int, shared: Sequence[str]
) -> LayerKind:
    """The kind of layer `index` of the list at `path`, which is like the shrunk layer `like`. shared: parts by name."""
    layer = model.get_submodule(f"{path}.{index}")

    def sum_text(*sums: Mapping[str, Evidence]) -> str:
        resolved = [{name: evidence.resolve(layer, config) for name, evidence in terms.items()} for terms in sums]
        return text_of_inputs(resolved)

    def spec(part: ProvenPart) -> PartSpec:
        inside = part.unit.call.name if isinstance(part.unit.call, ChainCall) else part.unit.path
        where = f"{path}.{{layer}}.{inside}".rstrip(".")
        block = _block(part.attempt, layer.get_submodule(part.path), config, where)
        block = with_tables(block, part.tables)
        name, reads = part.unit.name, sum_text(part.factors, *part.more)
        return PartSpec(name=name, block=block, reads=reads, shared=name in shared)

    again = None
    if like.again is not None:
        steps = [StepSpec(name=step.name, part=step.part, reads=sum_text(*step.reads)) for step in like.again.steps]
        parts = [spec(part) for part in like.again.parts]
        again = AgainSpec(parts=parts, steps=steps, gives=sum_text(like.again.gives))
    keeps = sum_text(like.keeps) if like.keeps else ""
    return LayerKind(parts=[spec(part) for part in like.parts], gives=sum_text(like.gives), keeps=keeps, again=again)


def _block(attempt: Attempt, module: nn.Module, config: Any, path: str) -> BlockSpec:
    spec = attempt.candidate.spec(module, config)
    proof = Proof(
        status="lifted" if attempt.candidate.lifts else "proven",
        module=path,
        error=max(rounded_up(attempt.error), 1e-12),
        evidence=[*attempt.candidate.describe(), *_executed(attempt)],
        why=attempt.why,
        computes=attempt.computes,
    )
    return spec.model_copy(update={"proof": proof})


def _executed(attempt: Attempt) -> list[str]:
    """The ledger of what the block and its module were both seen to execute, and what of the search was left undone."""
    executed = [f"on the small model both execute {attempt.operations}"] if attempt.operations else []
    skipped = f"not compared, since the reference gives nothing finite: {attempt.skipped}" if attempt.skipped else ""
    return executed + [line for line in (attempt.bound, skipped) if line]


def load_reference(model: nn.Module, reference: nn.Module, proven: Proven) -> None:
    """Copies the reference's weights into our model of the same sizes, through the proven parameter mappings; the
    reference may have other sizes than the one that they were proven on."""
    parts = proven.parts
    theirs = state_of(reference)
    values = {"embed.weight": reference.get_submodule(parts.embed).weight.detach()}  # type: ignore[operator]
    if not proven.tied:
        values["head.weight"] = reference.get_submodule(parts.head).weight.detach()  # type: ignore[operator]
    if f"{parts.head}.bias" in theirs:
        values["head_bias"] = theirs[f"{parts.head}.bias"]
    places = [("norm", parts.norm, proven.norm)]
    if proven.embed_norm is not None:
        places.append(("embed_norm", str(parts.embed_norm), proven.embed_norm))
    if proven.merge is not None:
        places.append(("merge", str(parts.merge), proven.merge))
    if proven.loop is not None and proven.loop.message is not None:
        places.append(("loop.message", str(proven.loop.parts.message), proven.loop.message))
    if (encoder := proven.encoder) is not None:
        places.append(("encoder.norm", encoder.parts.norm, encoder.norm))
        if encoder.own_embedding:
            held = reference.get_submodule(encoder.parts.embed).weight.detach()  # type: ignore[operator]
            values["encoder.embed.weight"] = held
    shapes = {name: tuple(value.shape) for name, value in model.state_dict().items()}
    sets = shared_sets(reference, proven, range(len(proven.layers)))
    for stack, (where, layers) in zip(("layers", "encoder.layers"), proven.stacks.items(), strict=False):
        for index, layer in enumerate(layers):
            for part in layer.all_parts:
                path = f"{where}.{index}.{part.path}".rstrip(".")
                ours = f"{stack}.{index}.{part.unit.name}"
                if stack == "layers" and (name := shared_name(ours, sets)) != ours:
                    if first_name(name, sets) != ours:
                        continue  # the first of the layers that share it has it
                    ours = name
                places.append((ours, path, part.attempt))
    claims = [(ours, path, attempt.candidate) for ours, path, attempt in places]
    if proven.layer_inputs is not None:
        claims.append(("layer_inputs", parts.layers.rpartition(".")[0], proven.layer_inputs))
    claims += [(f"rotaries.{index}", held.path, held.candidate) for index, held in enumerate(proven.rotaries)]
    for ours, path, candidate in claims:
        prefix = path + "."
        inner = {name.removeprefix(prefix): value for name, value in theirs.items() if name.startswith(prefix)}
        own = {n.removeprefix(f"{ours}."): shape for n, shape in shapes.items() if n.startswith(f"{ours}.")}
        candidate = refitted(candidate, own, {n: tuple(value.shape) for n, value in inner.items()})
        for name, value in candidate.values(inner).items():
            values[f"{ours}.{name}"] = value
    model.load_state_dict(values, strict=True)
