"""What a config says of a model, by synonym alone. Every other field that could change the maths stays open."""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from dayzero.onboard.by_rules import ASSUMED
from dayzero.onboard.config_fields import IRRELEVANT, MATHS, SIZES, ConfigView, field_of
from dayzero.onboard.prove.proven import Unproven
from dayzero.runtime.spec import BlockSpec, Proof

# Meaning -> the names that configs use for it.
FIELDS: dict[str, tuple[str, ...]] = {
    "activation": ("hidden_act", "hidden_activation", "mlp_hidden_act"),
    "eps": ("rms_norm_eps", "rms_norm_epsilon"),  # a name that says which norm it is of
    "theta": ("rope_theta",),
    "share": ("partial_rotary_factor",),
    "turned": ("rotary_dim",),
    "score": ("scoring_func", "score_function", "moe_router_activation_func"),
    "renormalise": ("norm_topk_prob", "moe_renormalize"),
    "scale": ("routed_scaling_factor",),
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}
# What tensors show, so that the fields are held against them: flag -> what it promises (`Layer.has`).
FLAGS: dict[str, str] = {
    "attention_bias": "query bias", "qkv_bias": "query bias", "mlp_bias": "feed-forward bias",
    "use_qk_norm": "query norm", "use_routing_bias": "router bias", "moe_router_enable_expert_bias": "router bias",
}  # fmt: skip
# Which layers have experts: their tensors show it.
_SHOWN = ("first_k_dense_replace", "num_dense_layers", "moe_layer_freq", "decoder_sparse_step", "mlp_only_layers")
# The values at which fields change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_dropout": (0,), "hidden_dropout": (0,), "resid_pdrop": (0,), "embd_pdrop": (0,), "attn_pdrop": (0,),
    "router_jitter_noise": (0,), "rope_interleave": (False,), "n_group": (0, 1), "topk_group": (0, 1),
    "topk_method": ("greedy", "noaux_tc"), "residual_multiplier": (1,), "embedding_multiplier": (1,),
    "logits_scaling": (1,), "shared_intermediate_size": (0,),
}  # fmt: skip
# Of each kind of rotary scaling, the settings that it has; those without a default come first.
_SCALINGS: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "default": ((), ()),
    "linear": (("factor",), ()),
    "llama3": (("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"), ()),
    "yarn": (
        ("factor",),
        ("original_max_position_embeddings", "beta_fast", "beta_slow", "attention_factor", "truncate"),
    ),
}
_FURTHER = re.compile(r"(^|_)(mtp|nextn)(_|$)")  # of layers that predict further tokens, which are carried
_WORDS = {"full_attention", "sliding_attention"}
_OF_EVERY_ROTARY = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}


@dataclass
class Settings:
    """The fields of a config as rules read them. open: what stays undecided, filled while reading.

    said: meaning -> "field=value" of what was read, for evidence.
    """

    view: ConfigView
    open: list[Unproven] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)

    def undecided(self, name: str, why: str, todo: str = "") -> None:
        self.open.append(Unproven(f"config.json: {self.view.prefix}{name}"[:160], why, todo=todo))

    def get(self, meaning: str) -> Any:
        """The value of the first field that has this meaning, None where none has. Two that disagree stay open."""
        held = [(name, self.view.get(name)) for name in FIELDS[meaning]]
        held = [(name, value) for name, value in held if value is not None]
        if not held:
            return None
        name, value = held[0]
        if any(other != value for _, other in held):
            self.undecided(" and ".join(name for name, _ in held), "both say the same thing, and they disagree")
        self.said[meaning] = f"{name}={value}"
        return value

    def number(self, meaning: str, default: float | None = None) -> float:
        """A finite number above 0. Without one, and without a default, it stays open."""
        value = self.get(meaning)
        if value is None and default is not None:
            return default
        if _is_number(value):
            return float(value)
        name = FIELDS[meaning][0]
        self.undecided(name, _missing(value, "a number above 0"), f"State {name} in config.json if you know it.")
        return 1.0

    def size(self, meaning: str) -> int:
        """A size that has to be known and that no tensor shows."""
        value = self.view.size(meaning)
        if value is None or value < 1:
            name = SIZES[meaning][0]
            self.undecided(name, _missing(value, "a size"), f"State {name} in config.json if you know it.")
            return 1
        self.said[meaning] = self.view.said(meaning)
        return value

    def activation(self) -> str:
        value = self.get("activation")
        if isinstance(value, str) and value in _ACTIVATIONS:
            return _ACTIVATIONS[value]
        self.undecided(FIELDS["activation"][0], _missing(value, f"one of {', '.join(_ACTIVATIONS)}"))
        return "silu"

    def renormalises(self) -> bool:
        """Whether the weights of a token's experts are made to sum to one."""
        value = self.get("renormalise")
        if isinstance(value, bool):
            return value
        name = FIELDS["renormalise"][0]
        why = f"{_missing(value, 'true or false')}: whether the weights of a token's experts sum to one"
        self.undecided(name, why, f"State {name} in config.json if you know it.")
        return False

    def score(self, has_bias: bool) -> tuple[str, str]:
        """(the score of a router, the evidence for it)."""
        value = self.get("score")
        if value is None:
            if has_bias:
                return "sigmoid", f"{ASSUMED}scores are sigmoids, since a correction bias is stored and no field says"
            return "softmax", f"{ASSUMED}scores are a softmax over all experts, since no field says otherwise"
        if value not in ("softmax", "sigmoid"):
            self.undecided(FIELDS["score"][0], _missing(value, "softmax or sigmoid"))
            return "softmax", ""
        return value, f"score {value} from {self.said['score']}"

    def rotary(self, head_dim: int) -> BlockSpec:
        """The model's only rotary table."""
        both = [self.view.get(name) for name in ("rope_parameters", "rope_scaling")]
        given = [held for held in both if held not in (None, {})]
        held = given[0] if given else {}
        if not isinstance(held, Mapping) or len(given) > 1 or any(isinstance(v, Mapping) for v in held.values()):
            self.undecided("rope_parameters", "no rule reads several tables, or what is no list of settings")
            held = {}
        theta, inner = self.view.get("rope_theta"), held.get("rope_theta")
        if inner is not None and theta is not None and inner != theta:
            self.undecided("rope_theta", f"{theta}, and {inner} in rope_parameters")
        theta = inner if inner is not None else theta
        if not _is_number(theta) or theta <= 1:
            self.undecided("rope_theta", _missing(theta, "the base of rotary positions, above 1"))
            theta = 10000.0
        dim, said = self._turned(held, head_dim)
        arguments = {"dim": dim, "theta": float(theta), **self._scaling(held)}
        evidence = [f"base {theta} and {said} from the config"]
        if head_dim != dim:
            evidence.append(f"{ASSUMED}the first {dim} of {head_dim} channels turn")
        return BlockSpec(block="Rotary", arguments=arguments, proof=unverified("config.json", evidence))

    def _turned(self, held: Mapping[str, Any], head_dim: int) -> tuple[int, str]:
        """(channels of a head that turn, what says so)."""
        share, turned, inner = self.get("share"), self.get("turned"), held.get("partial_rotary_factor")
        if inner is not None and share is not None and inner != share:
            self.undecided("partial_rotary_factor", f"{share}, and {inner} in rope_parameters")
        share = share if inner is None else inner
        dim, said = head_dim, f"all {head_dim} channels"
        if share is not None:
            if not _is_number(share) or share > 1:
                self.undecided("partial_rotary_factor", _missing(share, "a share of at most 1"))
                return dim, said
            dim, said = int(head_dim * share), f"{share} of {head_dim} channels"
        if turned is not None:
            if share is not None and turned != dim:
                self.undecided("rotary_dim", f"{turned}, and partial_rotary_factor={share} of {head_dim} channels")
            dim, said = turned, f"rotary_dim={turned}"
        if type(dim) is not int or dim % 2 or not 0 < dim <= head_dim:
            self.undecided("rotary_dim", f"{dim} channels of {head_dim} cannot turn in pairs")
            return head_dim, said
        return dim, said

    def _scaling(self, held: Mapping[str, Any]) -> dict[str, Any]:
        kind = held.get("rope_type", held.get("type", "default"))
        if not isinstance(kind, str) or kind not in _SCALINGS:
            known = ", ".join(_SCALINGS)
            self.undecided("rope_parameters.rope_type", f"{_missing(kind, 'one that rules know')}: {known}")
            return {}
        needed, optional = _SCALINGS[kind]
        for name in sorted(held.keys() - {*_OF_EVERY_ROTARY, *needed, *optional}):
            if held[name] is not None:
                self.undecided(f"rope_parameters.{name}", f"{held[name]!r}: no rule for {kind} positions reads it")
        values: dict[str, Any] = {name: held.get(name) for name in (*needed, *optional)}
        for name, value in values.items():
            if (value is None and name in needed) or (
                value is not None and name != "truncate" and not _is_number(value)
            ):
                self.undecided(f"rope_parameters.{name}", _missing(value, "a number above 0"))
                return {}
        if kind == "default":
            return {}
        factor = float(values["factor"])
        if kind == "linear":
            return {"scaling": "linear", "factor": factor}
        original = values["original_max_position_embeddings"] or self.view.get("max_position_embeddings")
        if type(original) is not int or original < 1:
            self.undecided("rope_parameters.original_max_position_embeddings", _missing(original, "a length"))
            return {}
        made = {"scaling": kind, "factor": factor, "original_length": original}
        if kind == "llama3":
            return made | {name: float(values[name]) for name in ("low_freq_factor", "high_freq_factor")}
        grown = values["attention_factor"]
        made["attention_factor"] = float(grown) if grown is not None else 0.1 * math.log(max(factor, 1.0)) + 1.0
        made |= {name: float(values[name]) for name in ("beta_fast", "beta_slow") if values[name] is not None}
        if isinstance(values["truncate"], bool):
            made["truncate"] = values["truncate"]
        return made

    def check_windows(self, layers: int) -> None:
        """Which layers have windows follows from `layer_types`, or from flags beside the window (`config_layers`)."""
        words, flag = self.view.get("layer_types"), self.view.get("use_sliding_window")
        first, name = self.view.get("max_window_layers"), field_of(self.view.text, "window")
        if words is not None and (not isinstance(words, list) or len(words) != layers):
            self.undecided("layer_types", f"expected a word for each of the {layers} layers")
        elif words and (other := {str(word) for word in words} - _WORDS):
            self.undecided("layer_types", f"no rule for {', '.join(sorted(other))}")
        elif words and "sliding_attention" in words and flag is False:
            self.undecided("use_sliding_window", "false, and layer_types names layers with a window")
        if flag is not None and not isinstance(flag, bool):
            self.undecided("use_sliding_window", _missing(flag, "true or false"))
        window = self.view.text[name] if name is not None else None
        if window in (None, 0, False) or flag is False:
            return
        if type(window) is not int or window < 1:
            self.undecided(str(name), _missing(window, "a number of tokens"))
        elif first is not None and flag is None and not words:
            self.undecided("max_window_layers", f"{first}, and no use_sliding_window says whether windows are used")

    def close(self, has: Mapping[str, bool], ignored: Mapping[str, Any], complete: bool) -> list[Unproven]:
        """Everything that stays open when all has been read. has: what tensors show (`FLAGS`). ignored: fields that a
        person accepts as they are. complete: every layer was understood, so that what was not read is not needed by
        any of them."""
        for name, promised in FLAGS.items():
            value = self.view.get(name)
            if value is not None and value is not has.get(promised, False):
                shown = "are" if has.get(promised) else "are not"
                self.undecided(name, f"{value!r}, yet tensors of a {promised} {shown} there")
        for name, values in _NEUTRAL.items():
            if (value := self.view.text.get(name)) is None or value in values:
                self.view.used.add(name)
        self.view.used.update(_SHOWN)
        for meaning, names in SIZES.items():
            held = {name: value for name in names if (value := self.view.text.get(name)) is not None}
            if any(value != next(iter(held.values())) for value in held.values()):
                self.undecided(" and ".join(held), f"both say the {meaning}, and they disagree")
        for name, changes in self._unread():
            if not changes:
                self.undecided(name, "no rule knows what this field changes")
            elif complete:
                self.undecided(name, f"it changes the {changes}, and no rule reads it")

        def accepted(item: Unproven) -> bool:
            path = item.where.removeprefix("config.json: ")
            return item.where != path and bool({path, path.split(".")[0]} & ignored.keys())

        return [item for item in self.open if not accepted(item)]

    def _unread(self) -> Iterator[tuple[str, str]]:
        """(field that no rule read, what it changes, "" where that is not known). A field inside of another was read
        where that was."""
        sizes = {name for names in SIZES.values() for name in names}
        for full, last, value in self.view.fields():
            name = full.removeprefix(self.view.prefix)
            first = name.partition(".")[0]
            if value in (None, [], {}) or first in self.view.used or {first, name} & IRRELEVANT.keys():
                continue
            if name in sizes or (last, value) == ("top_k", 50):  # shapes show sizes; 50 is what old configs sample from
                continue
            if _FURTHER.search(name):
                continue
            yield name, next((MATHS[part] for part in name.split(".") if part in MATHS), "")


def unverified(module: str, evidence: list[str]) -> Proof:
    """Of a block that rules chose. module: where its tensors stand."""
    return Proof(status="unverified", module=module, evidence=[line for line in evidence if line])


def _is_number(value: Any) -> TypeGuard[int | float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < 1e300


def _missing(value: Any, expected: str) -> str:
    found = "no field says it" if value is None else f"found {str(value)[:60]!r}"
    return f"{found}, expected {expected}"
