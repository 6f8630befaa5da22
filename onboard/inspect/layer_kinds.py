"""What kind a layer is, from the names and shapes of its tensors alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from dayzero.onboard.inspect.ledger import FeedForward, Mixer, Residual
from dayzero.onboard.inspect.tensor_names import Group

SOFTMAX: frozenset[Mixer] = frozenset({"full", "sliding", "latent", "sparse-indexed", "compressed"})
RECURRENT: frozenset[Mixer] = frozenset({"linear", "state-space"})
_ATTENTION_ROLES = {"query", "key", "value", "fused query-key-value", "query up", "key-value down", "joint key-value"}


@dataclass(frozen=True)
class Kind:
    """The kind of a layer and why."""

    mixer: Mixer
    ffn: FeedForward
    residual: Residual
    evidence: tuple[str, ...] = field(default=(), compare=False)

    def noting(self, line: str, **changes: Mixer) -> "Kind":
        """The same, with one more line of evidence and perhaps another mixer."""
        return replace(self, evidence=(*self.evidence, line), **changes)  # type: ignore[arg-type]


def kinds_of_layers(groups: list[Group], roles: list[str]) -> dict[int, Kind]:
    """Layer number -> kind, for the layers that these groups make. Layers with the same patterns are looked at once."""
    members: dict[int, list[int]] = {}
    for number, group in enumerate(groups):
        for layer in group.layers:
            members.setdefault(layer, []).append(number)
    known: dict[tuple[int, ...], Kind] = {}
    kinds = {}
    for layer, numbers in sorted(members.items()):
        key = tuple(numbers)
        if key not in known:
            known[key] = _kind({groups[number].pattern: roles[number] for number in numbers})
        kinds[layer] = known[key]
    return kinds


def _kind(roles: Mapping[str, str]) -> Kind:
    """roles: pattern -> role, of one layer."""
    names: dict[str, list[str]] = {}
    for pattern, role in roles.items():
        names.setdefault(role, []).append(pattern.split("{layer}.", 1)[-1])
    example = {
        role: min(tails, key=lambda tail: (tail.endswith("bias"), len(tail), tail)) for role, tails in names.items()
    }
    mixer, why = _mixer(example)
    ffn, more = _feed_forward(example)
    residual, also = _residual(example, names.get("norm", []))
    return Kind(mixer, ffn, residual, tuple(line for line in (why, more, also) if line))


def _mixer(has: Mapping[str, str]) -> tuple[Mixer, str]:
    """has: role -> a name. The first that fits: what is special decides, since all kinds of attention have queries."""
    attention = has.keys() & _ATTENTION_ROLES
    if "indexer" in has:
        return "sparse-indexed", f"has an indexer, which chooses the keys: {has['indexer']}"
    if "compressor" in has:
        return "compressed", f"has a compressor of keys and values: {has['compressor']}"
    if {"skip", "decay"} <= has.keys():
        return "state-space", f"has a decay and a skip: {has['decay']}, {has['skip']}"
    if "decay" in has:
        return "linear", f"has a decay: {has['decay']}"
    if attention and {"attention gate", "output norm"} <= has.keys():
        return "linear", f"normalises and gates its output: {has['output norm']}, {has['attention gate']}"
    if "short convolution" in has and not attention:
        return "conv", f"mixes by a short convolution alone: {has['short convolution']}"
    for role, words in (("key-value down", "come from one latent"), ("joint key-value", "are one vector")):
        if role in has:
            return "latent", f"keys and values {words}: {has[role]}"
    if {"query", "key", "value"} <= has.keys():
        return "full", f"has queries, keys and values: {has['query']}, {has['key']}, {has['value']}"
    if "fused query-key-value" in has:
        return "full", f"has queries, keys and values in one matrix: {has['fused query-key-value']}"
    if attention or "attention output" in has:
        return "unknown", f"has some parts of attention only: {has[min(attention or {'attention output'})]}"
    return "none", "has no mixer"


def _feed_forward(has: Mapping[str, str]) -> tuple[FeedForward, str]:
    if "router table" in has:
        return "hashed", f"experts are chosen by a table of token ids: {has['router table']}"
    if "expert" in has:
        shared = " and shared experts" if "shared expert" in has else ""
        dense = " beside a dense feed-forward" if "feed-forward" in has else ""
        return "routed", f"has experts{shared}{dense}: {has['expert']}"
    return ("dense", f"has a plain feed-forward: {has['feed-forward']}") if "feed-forward" in has else ("none", "")


def _residual(has: Mapping[str, str], norms: list[str]) -> tuple[Residual, str]:
    """norms: names of the layer's norms; those of the layer itself have no further dot."""
    if "residual mixing" in has:
        return "attention-residual", f"mixes earlier residuals: {has['residual mixing']}"
    if "stream mixing" in has:
        return "hyper-connections", f"mixes several residual streams: {has['stream mixing']}"
    own = sorted(name for name in norms if name.count(".") == 1 and name.endswith(".weight"))
    if len(own) >= 4:
        return "sandwich", f"has norms before and after its parts: {', '.join(own)}"
    if len(own) == 1 and has.keys() & _ATTENTION_ROLES and has.keys() & {"feed-forward", "expert"}:
        return "parallel", f"has one norm for mixer and feed-forward: {own[0]}"
    return "plain", ""
