"""The proven parts put together: the model as data, of the shrunk reference or of the real one, and its weights."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from dayzero.onboard.align.ladder import rounded_up
from dayzero.onboard.candidates import Evidence
from dayzero.onboard.candidates.rotary import TOLERANCE as ROTARY_TOLERANCE
from dayzero.onboard.lift import merge as merged_source
from dayzero.onboard.prove import Attempt
from dayzero.onboard.proven import Proven
from dayzero.onboard.reference import state_of
from dayzero.onboard.rotary_tables import with_tables
from dayzero.runtime.nn.wiring import text_of_inputs
from dayzero.runtime.spec import BlockSpec, CheckpointId, LayerKind, LayerRun, ModelSpec, PartSpec, Proof


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


def _query_scale_block(proven: Proven, model: nn.Module, config: Any) -> BlockSpec | None:
    if proven.query_scale is None:
        return None
    proof = Proof(status="proven", module="", error=ROTARY_TOLERANCE, evidence=proven.query_scale.describe())
    return proven.query_scale.spec(model, config).model_copy(update={"proof": proof})


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
        block = with_tables(block, part.tables)
        held.append(PartSpec(name=part.unit.name, block=block, reads=sum_text(part.factors, *part.more)))
    like = proven.layers[shrunk]
    return LayerKind(parts=held, gives=sum_text(like.gives), keeps=sum_text(like.keeps) if like.keeps else "")


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
    claims = [(ours, path, attempt.candidate) for ours, path, attempt in places]
    claims += [(f"rotaries.{index}", held.path, held.candidate) for index, held in enumerate(proven.rotaries)]
    for ours, path, candidate in claims:
        prefix = path + "."
        inner = {name.removeprefix(prefix): value for name, value in theirs.items() if name.startswith(prefix)}
        for name, value in candidate.values(inner).items():
            values[f"{ours}.{name}"] = value
    model.load_state_dict(values, strict=True)
