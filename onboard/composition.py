"""The reference taken apart into proven blocks, and put together again from ours."""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from dayzero.onboard.align.ladder import rounded_up
from dayzero.onboard.candidates import Candidate, site_of
from dayzero.onboard.candidates.rotary import TOLERANCE as ROTARY_TOLERANCE
from dayzero.onboard.candidates.rotary import propose_rotary
from dayzero.onboard.discover import Call, ModelParts, Undiscovered, discover, tensors
from dayzero.onboard.prove import Attempt, prove
from dayzero.onboard.reference import state_of
from dayzero.onboard.shrink import layer_signatures, part_signature
from dayzero.runtime.spec import BlockSpec, CheckpointId, LayerKind, LayerRun, ModelSpec, Proof

ROLES = ("mixer_norm", "mixer", "ffn_norm", "ffn")
_ROLE_OF_PART = {"mixer_norm": "norm", "mixer": "mixer", "ffn_norm": "norm", "ffn": "ffn", "norm": "norm"}


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
class Proven:
    """What holds for the shrunk model. parts[i]: role -> attempt that stands for it in layer i."""

    parts: ModelParts
    layers: list[dict[str, Attempt]]
    norm: Attempt
    rotary: Candidate | None
    tied: bool


def prove_model(
    reference: nn.Module,
    ids: torch.Tensor,
    generator: torch.Generator,
    tell: Callable[[str], None] = lambda line: None,
) -> tuple[Proven, dict[str, list[Attempt]]]:
    """Every distinct block of the reference, proven, and all attempts by module path. Raises NotProven."""
    try:
        parts = discover(reference, ids)
    except Undiscovered as error:
        raise NotProven([Unproven("structure", str(error))]) from None
    unproven: list[Unproven] = []
    attempts: dict[str, list[Attempt]] = {}
    known: dict[tuple, Attempt] = {}

    def best(role: str, path: str, signature: tuple) -> Attempt | None:
        if signature in known:
            return known[signature]
        tell(f"proving {path}")
        verdict = prove(_ROLE_OF_PART[role], site_of(parts.calls, path, reference.config), generator)
        attempts[path] = verdict.attempts
        if not verdict.survivors:
            nearest = sorted(verdict.attempts, key=lambda attempt: (not attempt.thorough, attempt.error))[:3]
            tried = [f"{a.candidate.block}: {a.objection}" for a in nearest]
            kind = type(parts.calls[path].module).__name__
            why = f"no block reproduces {kind}" if tried else f"no block here is like {kind}"
            unproven.append(Unproven(path, why, tried))
            return None
        known[signature] = verdict.survivors[0]
        return known[signature]

    layers = []
    signatures = layer_signatures(reference)
    for index, layer in enumerate(parts.layer_parts):
        chosen = {}
        for role in ROLES:
            path = f"{parts.layers}.{index}.{getattr(layer, role)}"
            signature = part_signature(signatures[index], getattr(layer, role))
            chosen[role] = best(role, path, (role, signature, _handed(parts.calls[path])))
        layers.append(chosen)
    norm = best("norm", parts.norm, ("final",))
    rotary = None
    if parts.rotary is not None:
        rotary = propose_rotary(parts.calls[parts.rotary], reference.config)
        if rotary is None:
            kind = type(parts.calls[parts.rotary].module).__name__
            unproven.append(Unproven(parts.rotary, f"no formula here gives the tables of {kind}"))
    if unproven or norm is None:
        raise NotProven(unproven)
    head, embed = parts.calls[parts.head].module, parts.calls[parts.embed].module
    return Proven(parts, layers, norm, rotary, head.weight is embed.weight), attempts


def _handed(call: Call) -> tuple[str, ...]:
    """Digests of the tensors that a module is handed beside its hidden input, such as its mask."""
    others = [tensor for tensor in tensors((call.args, call.kwargs)) if tensor is not call.hidden]
    return tuple(hashlib.sha256(tensor.detach().numpy().tobytes()).hexdigest() for tensor in others)


def specification_of(
    model: nn.Module, config: Any, proven: Proven, follows: list[int], identity: CheckpointId, name: str
) -> ModelSpec:
    """The specification of `model`, whose layer i is like the shrunk layer follows[i]; without weight rules."""
    parts = proven.parts
    kinds: list[LayerKind] = []
    runs: list[LayerRun] = []
    for index, shrunk in enumerate(follows):
        blocks = {}
        for role in ROLES:
            path = getattr(parts.layer_parts[shrunk], role)
            module = model.get_submodule(f"{parts.layers}.{index}.{path}")
            blocks[role] = _block(proven.layers[shrunk][role], module, config, f"{parts.layers}.{{layer}}.{path}")
        kind = LayerKind(**blocks)
        if kind not in kinds:
            kinds.append(kind)
        number = kinds.index(kind)
        if runs and runs[-1].kind == number:
            runs[-1] = runs[-1].model_copy(update={"count": runs[-1].count + 1})
        else:
            runs.append(LayerRun(first=index, count=1, kind=number))
    embed = model.get_submodule(parts.embed)
    rotary = None
    if proven.rotary is not None:
        rotary = proven.rotary.spec(model.get_submodule(str(parts.rotary)), config)
        evidence = proven.rotary.describe()
        proof = Proof(status="proven", module=str(parts.rotary), error=ROTARY_TOLERANCE, evidence=evidence)
        rotary = rotary.model_copy(update={"proof": proof})
    norm = _block(proven.norm, model.get_submodule(parts.norm), config, parts.norm)
    return ModelSpec(
        name=name,
        checkpoint=identity,
        vocabulary=embed.weight.shape[0],  # type: ignore[union-attr]
        hidden=embed.weight.shape[1],  # type: ignore[union-attr]
        tied=proven.tied,
        rotary=rotary,
        layer_kinds=kinds,
        layers=runs,
        norm=norm,
        rules=[],
        initializer_range=float(getattr(config, "initializer_range", None) or 0.02),
        max_positions=getattr(config, "max_position_embeddings", None),
    )


def _block(attempt: Attempt, module: nn.Module, config: Any, path: str) -> BlockSpec:
    spec = attempt.candidate.spec(module, config)
    proof = Proof(
        status="proven", module=path, error=max(rounded_up(attempt.error), 1e-12), evidence=attempt.candidate.describe()
    )
    return spec.model_copy(update={"proof": proof})


def load_reference(model: nn.Module, reference: nn.Module, proven: Proven) -> None:
    """Copies the reference's weights into our model of the same sizes, through the proven parameter mappings."""
    parts = proven.parts
    theirs = state_of(reference)
    values = {"embed.weight": theirs[f"{parts.embed}.weight"]}
    if not proven.tied:
        values["head.weight"] = theirs[f"{parts.head}.weight"]
    places = [("norm", parts.norm, proven.norm)]
    for index, layer in enumerate(proven.layers):
        for role, attempt in layer.items():
            places.append(
                (f"layers.{index}.{role}", f"{parts.layers}.{index}.{getattr(parts.layer_parts[index], role)}", attempt)
            )
    for ours, path, attempt in places:
        prefix = path + "."
        inner = {name.removeprefix(prefix): value for name, value in theirs.items() if name.startswith(prefix)}
        for name, value in attempt.candidate.values(inner).items():
            values[f"{ours}.{name}"] = value
    model.load_state_dict(values, strict=True)
