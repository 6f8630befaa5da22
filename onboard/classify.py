"""The ledger: a role and a fate for every tensor, a kind for every layer, and the evidence for each.

Roles come from names and shapes and only describe; what a tensor is used for is settled by the proven rules, which give
it its fate. A tensor without a fate is an error.
"""

import math
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from dayzero.onboard.checkpoint import Checkpoint
from dayzero.onboard.config_fields import IRRELEVANT, RENAMED, SIZES, field_of, size_of
from dayzero.onboard.tensor_names import Group, fold, ranges
from dayzero.runtime.errors import InputError
from dayzero.runtime.spec import ModelSpec, Record
from dayzero.runtime.weights import bind

Fate = Literal["mapped", "ignored", "open"]
Mixer = Literal["full", "unknown"]
FeedForward = Literal["dense", "routed", "none", "unknown"]

# Role -> what the last parts of a name say. Order matters: the first that fits is taken.
_GRAMMAR: tuple[tuple[str, str], ...] = (
    ("rotary table", r"inv_freq$"),
    ("shared expert", r"shared_experts?\b"),
    ("router bias", r"(correction_bias|expert_bias)$"),
    ("expert", r"experts?\.(\{expert\}\.|.*(gate_up|gate|up|down)_proj)"),
    ("router", r"(gate|router|wg)\.weight$"),
    ("query norm", r"(q_norm|query_norm|q_layernorm)\.weight$"),
    ("key norm", r"(k_norm|key_norm|k_layernorm)\.weight$"),
    ("query", r"(q_proj|query|wq)\.(weight|bias)$"),
    ("key", r"(k_proj|key|wk)\.(weight|bias)$"),
    ("value", r"(v_proj|value|wv)\.(weight|bias)$"),
    ("attention output", r"(attn|attention)\.(o_proj|out_proj|dense|wo)\.(weight|bias)$"),
    ("feed-forward", r"(gate_proj|up_proj|down_proj|w1|w2|w3|gate_up_proj)\.(weight|bias)$"),
    ("norm", r"norm[^.]*\.(weight|bias)$"),
    ("embedding", r"(embed_tokens|word_embeddings|wte|tok_embeddings|embed)\.weight$"),
    ("head", r"(lm_head|output|head)\.weight$"),
)


class TensorGroup(Record):
    """Tensors of one pattern. layers, experts: ranges like `0-29`. parameter: the model parameter that they become;
    reason: why they are ignored, or why their fate is open."""

    pattern: str
    count: int
    dtype: str
    shape: list[int]
    bytes: int
    layers: str = ""
    experts: str = ""
    role: str
    fate: Fate = "open"
    parameter: str | None = None
    reason: str = ""

    @property
    def elements(self) -> int:
        """Values in all tensors of the group."""
        return self.count * math.prod(self.shape)


class Experts(Record):
    count: int = 0
    top_k: int = 0
    shared: int = 0


class LayerRange(Record):
    """Consecutive layers of one kind, `0-29`."""

    layers: str
    mixer: Mixer
    ffn: FeedForward
    evidence: list[str]


class Ledger(Record):
    """unaccounted: names of tensors without a fate. unread_config: fields that nobody explains."""

    tensors: int
    bytes: int
    parameters: int
    groups: list[TensorGroup]
    layers: list[LayerRange]
    experts: Experts
    quantization: dict[str, Any] = Field(default_factory=dict)
    unaccounted: list[str] = Field(default_factory=list)
    unread_config: list[str] = Field(default_factory=list)

    def layer_counts(self) -> dict[str, dict[str, int]]:
        """{"mixer": {kind: layers}, "ffn": {kind: layers}}."""
        mixer: Counter[str] = Counter()
        ffn: Counter[str] = Counter()
        for run in self.layers:
            for part in run.layers.split(", "):
                low, _, high = part.partition("-")
                count = int(high or low) - int(low) + 1
                mixer[run.mixer] += count
                ffn[run.ffn] += count
        return {"mixer": dict(mixer), "ffn": dict(ffn)}

    def mapped_parameters(self) -> int:
        """Parameters of the model that the mapped tensors make."""
        return sum(group.elements for group in self.groups if group.fate == "mapped")

    def summary(self) -> dict[str, Any]:
        """What `onboard inspect --json` prints."""
        return {
            "tensors": self.tensors,
            "bytes": self.bytes,
            "parameters": self.parameters,
            "layers": self.layer_counts(),
            "experts": self.experts.model_dump(),
            "quantization": self.quantization,
            "unaccounted": self.unaccounted,
            "unread_config": self.unread_config,
        }


def role_of(group: Group) -> str:
    """The role that the name suggests; `unknown` where the grammar has no word for it."""
    for role, pattern in _GRAMMAR:
        if re.search(pattern, group.pattern):
            # Some families call the gate matrix of a plain feed-forward layer what others call the router.
            return "feed-forward" if role == "router" and len(group.shape) != 2 else role
    return "unknown"


def classify(checkpoint: Checkpoint) -> Ledger:
    """From headers and config alone: roles and kinds. No fate is settled yet, so nothing counts as unaccounted but
    tensors whose role is unknown."""
    groups = fold(checkpoint.headers)
    roles = [role_of(group) for group in groups]
    by_layer: dict[int, set[str]] = {}
    for group, role in zip(groups, roles, strict=True):
        for layer in group.layers:
            by_layer.setdefault(layer, set()).add(role)
    runs: list[LayerRange] = []
    described: dict[tuple[Mixer, FeedForward, tuple[str, ...]], list[int]] = {}
    for layer, present in sorted(by_layer.items()):
        described.setdefault((*_kinds(present), tuple(sorted(present))), []).append(layer)
    for (mixer, ffn, present), layers in sorted(described.items(), key=lambda item: item[1]):
        evidence = [f"has {', '.join(present)}"]
        runs.append(LayerRange(layers=ranges(layers), mixer=mixer, ffn=ffn, evidence=evidence))
    expert_numbers = {n for g, role in zip(groups, roles, strict=True) if role == "expert" for n in g.experts}
    stacked = [g.shape[0] for g, role in zip(groups, roles, strict=True) if role == "expert" and len(g.shape) == 3]
    shared = any(role == "shared expert" for role in roles)
    return Ledger(
        tensors=len(checkpoint.headers),
        bytes=checkpoint.total_bytes,
        parameters=sum(math.prod(header.shape) for header in checkpoint.headers.values()),
        groups=[_group(group, role) for group, role in zip(groups, roles, strict=True)],
        layers=runs,
        experts=Experts(
            count=len(expert_numbers) or max(stacked, default=0),
            top_k=(size_of(checkpoint.config, "top_k") or 0) if expert_numbers or stacked else 0,
            shared=(size_of(checkpoint.config, "shared_experts") or 1) if shared else 0,
        ),
        quantization=checkpoint.quantization,
        unaccounted=[name for g, role in zip(groups, roles, strict=True) if role == "unknown" for name in g.names],
        unread_config=unknown_fields(checkpoint.config),
    )


def _kinds(present: set[str]) -> tuple[Mixer, FeedForward]:
    mixer: Mixer = "full" if {"query", "key", "value"} <= present else "unknown"
    if "expert" in present:
        return mixer, "routed"
    return mixer, "dense" if "feed-forward" in present else "none"


def _group(group: Group, role: str) -> TensorGroup:
    return TensorGroup(
        pattern=group.pattern,
        count=len(group.names),
        dtype=group.dtype,
        shape=list(group.shape),
        bytes=group.bytes,
        layers=ranges(group.layers),
        experts=ranges(group.experts),
        role=role,
    )


def unknown_fields(config: Mapping[str, Any]) -> list[str]:
    """Config fields that neither the list of sizes nor the list of irrelevant ones knows. A run asks the reference,
    which knows more; without one this is all that names can tell."""
    known = {name for names in SIZES.values() for name in names} | IRRELEVANT.keys() | RENAMED.keys()
    common = {
        "rope_parameters", "rms_norm_eps", "layer_norm_eps", "hidden_act", "attention_bias", "mlp_bias",
        "norm_topk_prob", "attention_dropout", "router_jitter_noise", "layer_types", "mlp_only_layers",
        "decoder_sparse_step", "use_sliding_window", "max_window_layers", "clip_qkv", "quantization_config",
    }  # fmt: skip
    return sorted(name for name in config if name not in known | common)


def settle(ledger: Ledger, checkpoint: Checkpoint, spec: ModelSpec, shapes: Mapping[str, tuple[int, ...]]) -> Ledger:
    """The ledger with the fate that the proven rules give every tensor.

    shapes: of the real model's parameters. Raises InputError where a rule needs a tensor that the checkpoint does not
    have, or one of another shape: the config and the files disagree.
    """
    bound = bind([rule.build() for rule in spec.rules])
    stored = {name: header.shape for name, header in checkpoint.headers.items()}
    target: dict[str, str] = {}
    for parameter, rule in bound.items():
        names = rule.names()
        for name in names:
            if name not in stored:
                raise InputError(
                    name,
                    found="not in the checkpoint",
                    expected=f"a tensor, from {_sizes(checkpoint.config)} in config.json",
                    hint=f"{sum(n in stored for n in names)} of the {len(names)} tensors of {parameter} are there. "
                    "Is a shard missing from the index, or is config.json of another revision?",
                )
            target[name] = parameter
        _check_shape(parameter, rule, stored, shapes, checkpoint)
    if missing := sorted(shapes.keys() - bound.keys()):
        raise InputError("weights", found=f"no rule makes {missing[0]}", expected="a source for every parameter")
    fates: dict[str, tuple[Fate, str | None, str]] = {}
    open_names: list[str] = []
    for name in stored:
        if name in target:
            fates[name] = ("mapped", target[name], "")
        elif name.endswith("rotary_emb.inv_freq"):
            fates[name] = ("ignored", None, "computed from the config; the rotary proof covers it")
        else:
            fates[name] = ("open", None, "no parameter of the proven model is made of it")
            open_names.append(name)
    groups = []
    for folded, group in zip(fold(checkpoint.headers), ledger.groups, strict=True):
        fate, parameter, reason = fates[folded.names[0]]
        if any(fates[name][0] != fate for name in folded.names):
            fate, parameter, reason = "open", None, "some of these tensors are used and some are not"
        template = re.sub(r"^layers\.\d+\.", "layers.{layer}.", parameter) if parameter else None
        groups.append(group.model_copy(update={"fate": fate, "parameter": template, "reason": reason}))
    return ledger.model_copy(update={"groups": groups, "unaccounted": open_names})


def _sizes(config: Mapping[str, Any]) -> str:
    names = [name for meaning in ("layers", "experts") for name in SIZES[meaning] if config.get(name) is not None]
    return ", ".join(f"{name}={config[name]}" for name in names)


def _check_shape(
    parameter: str,
    rule: Any,
    stored: Mapping[str, tuple[int, ...]],
    shapes: Mapping[str, tuple[int, ...]],
    checkpoint: Checkpoint,
) -> None:
    try:
        found = rule.shape(stored)
    except ValueError as error:
        raise InputError(parameter, found=str(error), expected="tensors that fit together") from None
    expected = shapes[parameter]
    if found == expected:
        return
    name = rule.names()[0]
    wrong = [size for size, other in zip(expected, found, strict=False) if size != other] or list(expected)
    fields = ", ".join(f"{field}={value}" for field, value in _behind(wrong, checkpoint.config).items())
    raise InputError(
        name,
        found=f"{list(stored[name])} in {checkpoint.headers[name].file}",
        expected=f"{list(expected)} for {parameter}, from {fields or 'its sizes'} in config.json",
        hint="The config and the tensors disagree. Is one of them of another revision? "
        f"Look with: onboard inspect {checkpoint.path.name}",
    )


def _behind(sizes: list[int], config: Mapping[str, Any]) -> dict[str, int]:
    """Config fields that are one of these sizes, or half of one, or whose heads times the head size are one."""
    held = {field: size for names in SIZES.values() for field in names if type(size := config.get(field)) is int}
    found = {field: value for field, value in held.items() if value > 1 and {value, 2 * value} & set(sizes)}
    head_dim = size_of(config, "head_dim")
    for heads in (field_of(config, "heads"), field_of(config, "kv_heads")):
        if head_dim and heads in held and held[heads] * head_dim in sizes:
            found |= {heads: held[heads], str(field_of(config, "head_dim")): head_dim}
    return found
