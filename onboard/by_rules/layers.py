"""The blocks of a layer, and where their parameters come from, by the names and shapes of its tensors."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from dayzero.onboard.by_rules import ASSUMED
from dayzero.onboard.by_rules.settings import Settings, unverified
from dayzero.runtime.spec import BlockSpec, LayerKind
from dayzero.runtime.weights import Concat, Source, Stack, Stored

# The norms of a layer by their names: before attention, and before the feed-forward layer.
_BEFORE_MIXER = ("input_layernorm", "attention_norm", "attn_norm", "pre_attention_layernorm")
_BEFORE_FFN = ("post_attention_layernorm", "ffn_norm", "mlp_norm", "pre_feedforward_layernorm", "pre_mlp_layernorm")
_PROJECTIONS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
_ATTENTION = {"query": "query", "key": "key", "value": "value", "attention output": "output"}
_COVERED = {
    *_ATTENTION, "query norm", "key norm", "norm", "feed-forward", "router", "router bias", "expert", "shared expert",
    "shared expert gate",
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """The tensors of one pattern in one layer. tail: what follows `{layer}.`; experts: how many there are, 0 where the
    pattern has none."""

    pattern: str
    tail: str
    shape: tuple[int, ...]
    role: str
    experts: int = 0

    @property
    def owner(self) -> str:
        """The module that holds it."""
        return self.pattern.rpartition(".")[0]

    @property
    def leaf(self) -> str:
        return self.pattern.rpartition(".")[2]

    @property
    def is_numbered_as_usual(self) -> bool:
        """Whether its name has a number for the layer and for an expert, and no other."""
        return set(re.findall(r"\{(\w+)\}", self.pattern)) == {"layer", *(["expert"] if self.role == "expert" else [])}


@dataclass
class Layer:
    """A kind of layer as its tensors show it. numbers: of the layers. sources: parameter, relative to the layer, ->
    where it comes from. has: what its tensors show (`settings.FLAGS`). head_dim: of its heads. open: what stays
    undecided, (where, why)."""

    numbers: list[int]
    found: Sequence[Found]
    hidden: int
    settings: Settings
    sliding: bool
    sources: dict[str, Source] = field(default_factory=dict)
    has: dict[str, bool] = field(default_factory=dict)
    head_dim: int = 0
    open: list[tuple[str, str]] = field(default_factory=list)

    def undecided(self, name: str, why: str) -> None:
        self.open.append((name, why))

    def of(self, *roles: str) -> list[Found]:
        return [found for found in self.found if found.role in roles]

    def kind(self) -> LayerKind | None:
        """The layer as parts and wiring; None where rules leave something open."""
        for found in self.found:
            if found.role not in _COVERED or (found.role != "expert" and not found.is_numbered_as_usual):
                role = "of no known role" if found.role == "unknown" else f"of the role '{found.role}'"
                self.undecided(found.pattern, f"{list(found.shape)}, {role}: no rule says what it computes")
        norms, mixer, ffn = self._norms(), self._attention(), self._feed_forward()
        if self.open or norms is None or mixer is None or ffn is None:
            return None
        return LayerKind.pre_norm(norms[0], mixer, norms[1], ffn)

    # --- norms --------------------------------------------------------------------------------------------------------

    def _norms(self) -> tuple[BlockSpec, BlockSpec] | None:
        named: dict[str, Found] = {}
        for found in self.of("norm"):
            word, _, leaf = found.tail.partition(".")
            place = "mixer_norm" if word in _BEFORE_MIXER else "ffn_norm" if word in _BEFORE_FFN else ""
            if not place or leaf != "weight" or place in named or found.shape != (self.hidden,):
                self.undecided(found.pattern, f"{list(found.shape)}, a norm whose place no rule knows")
                return None
            named[place] = found
        if len(named) != 2:
            stored = ", ".join(found.tail for found in named.values()) or "none"
            self.undecided("norms", f"found {stored}, expected one before attention and one before the feed-forward")
            return None
        for place, found in named.items():
            self.sources[f"{place}.weight"] = Stored(found.pattern)
        where = {"mixer_norm": "attention reads it and is", "ffn_norm": "the feed-forward layer reads it and is"}
        blocks = [
            norm(found, self.settings, [f"{ASSUMED}{where[place]} added to the stream"])
            for place, found in sorted(named.items(), reverse=True)
        ]
        return blocks[0], blocks[1]

    # --- attention ----------------------------------------------------------------------------------------------------

    def _attention(self) -> BlockSpec | None:
        weights, biases = self._projections()
        if weights is None:
            return None
        query, key, value, output = (weights[name] for name in _ATTENTION.values())
        heads = self.settings.size("heads")
        head_dim, left = divmod(query.shape[0], heads)
        kv_heads, odd = divmod(key.shape[0], head_dim or 1)
        fits = not left and not odd and kv_heads and not heads % kv_heads
        rows = heads * head_dim
        wanted = {query: (rows, self.hidden), value: key.shape, output: (self.hidden, rows)}
        wrong = [f"{f.tail} {list(f.shape)}" for f, shape in wanted.items() if f.shape != shape]
        if not fits or wrong or key.shape[1:] != (self.hidden,):
            shapes = ", ".join(f"{found.tail} {list(found.shape)}" for found in (query, key, value, output))
            self.undecided(query.owner, f"{shapes} are not {heads} heads that share keys and values")
            return None
        self.head_dim = head_dim
        self._held("head_dim", head_dim, query)
        self._held("kv_heads", kv_heads, key)
        said = self.settings.said["heads"]
        evidence = [
            f"{heads} heads from {said}; {kv_heads} key/value heads of {head_dim} channels from shapes",
            f"{ASSUMED}scores are scaled by the root of the head size, {head_dim}",
            f"{ASSUMED}channel i turns with channel i + half, not with its neighbour",
        ]
        arguments: dict[str, Any] = {
            "hidden": self.hidden, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "scale": head_dim**-0.5,
            **self._qk_norms(query, heads, kv_heads, evidence), **biases,
        }  # fmt: skip
        if self.sliding:
            arguments["window"] = self.settings.size("window")
            evidence.append(f"window from {self.settings.view.said('window')}")
        for name, found in weights.items():
            self.sources[f"mixer.{name}.weight"] = Stored(found.pattern)
        return BlockSpec(
            block="GroupedQueryAttention",
            arguments=arguments,
            proof=unverified(query.owner.rpartition(".")[0], evidence),
        )

    def _projections(self) -> tuple[dict[str, Found] | None, dict[str, bool]]:
        """The four matrices, and which of them have biases as the block has them; None where that is not so."""
        weights: dict[str, Found] = {}
        biases: dict[str, Found] = {}
        for found in self.of(*_ATTENTION):
            held, name = (weights if found.leaf == "weight" else biases), _ATTENTION[found.role]
            if found.leaf not in ("weight", "bias") or name in held or len(found.shape) != 1 + (found.leaf == "weight"):
                self.undecided(
                    found.pattern, f"{list(found.shape)}, a second {found.role}, or no matrix or bias of one"
                )
                return None, {}
            held[name] = found
        if missing := [name for name in _ATTENTION.values() if name not in weights]:
            self.undecided("attention", f"no tensor is a projection to or of {', '.join(missing)}")
            return None, {}
        joint = {name in biases for name in ("query", "key", "value")}
        if len(joint) > 1 or any(found.shape != weights[name].shape[:1] for name, found in biases.items()):
            self.undecided(
                "attention", f"found biases of {', '.join(biases)} only, expected query, key and value, or none"
            )
            return None, {}
        self.has["query bias"] = joint.pop()
        for name, found in biases.items():
            self.sources[f"mixer.{name}.bias"] = Stored(found.pattern)
        return weights, {"bias": self.has["query bias"], "output_bias": "output" in biases}

    def _qk_norms(self, query: Found, heads: int, kv_heads: int, evidence: list[str]) -> dict[str, Any]:
        norms = {found.role.partition(" ")[0]: found for found in self.of("query norm", "key norm")}
        self.has["query norm"] = bool(norms)
        if not norms:
            return {}
        shapes = {name: found.shape for name, found in norms.items()}
        kinds = {
            "head": dict.fromkeys(("query", "key"), (self.head_dim,)),
            "whole": {"query": (heads * self.head_dim,), "key": (kv_heads * self.head_dim,)},
        }
        kind = next((name for name, wanted in kinds.items() if shapes == wanted), None)
        usual = all(found.owner.endswith(("q_norm", "k_norm")) for found in norms.values())
        if kind is None or not usual or len(self.of("query norm", "key norm")) != 2:
            said = ", ".join(f"{found.tail} {list(found.shape)}" for found in norms.values())
            self.undecided(query.owner.rpartition(".")[0], f"{said}: no rule says what these norms are of, or when")
            return {}
        for name, found in norms.items():
            self.sources[f"mixer.{name}_norm.weight"] = Stored(found.pattern)
        evidence.append(f"norm of queries and keys ({kind}) from its shape")
        evidence.append(f"{ASSUMED}queries and keys are normed before they turn")
        return {"qk_norm": kind, "qk_norm_eps": self.settings.number("eps")}

    # --- feed-forward -------------------------------------------------------------------------------------------------

    def _feed_forward(self) -> BlockSpec | None:
        dense, experts = self.of("feed-forward"), self.of("expert")
        beside = self.of("router", "router bias", "shared expert", "shared expert gate")
        if dense and not experts and not beside:
            block, bias = self._gated(dense, "ffn")
            if block is None:
                return None
            self.has["feed-forward bias"] = bias
            self._held("width", block.arguments["width"], dense[0])
            return block
        if not experts or dense:
            self.undecided("feed-forward", "found neither a dense feed-forward layer nor routed experts alone")
            return None
        return self._routed(experts)

    def _gated(self, tensors: Sequence[Found], place: str) -> tuple[BlockSpec | None, bool]:
        """(a gated feed-forward layer of these tensors, whether it has biases). place: of its parameters."""
        named = self._by_projection(tensors)
        if named is None:
            return None, False
        gate, up, down = (named[name, "weight"] for name in ("gate", "up", "down"))
        biases = {name: named[name, "bias"] for name in ("gate", "up", "down") if (name, "bias") in named}
        width = gate.shape[0]
        fits = gate.shape == up.shape == (width, self.hidden) and down.shape == (self.hidden, width)
        if not fits or len(biases) not in (0, 3):
            shapes = ", ".join(f"{found.tail} {list(found.shape)}" for found in tensors)
            self.undecided(gate.owner.rpartition(".")[0], f"{shapes} are not a gate, a value and the way back")
            return None, False
        for (name, leaf), found in named.items():
            self.sources[f"{place}.{name}.{leaf}"] = Stored(found.pattern)
        arguments = {"hidden": self.hidden, "width": width, "act": self.settings.activation(), "bias": bool(biases)}
        proof = unverified(gate.owner.rpartition(".")[0], [*self._gate_evidence(gate), self._activation_said()])
        return BlockSpec(block="GatedFeedForward", arguments=arguments, proof=proof), bool(biases)

    def _by_projection(self, tensors: Sequence[Found]) -> dict[tuple[str, str], Found] | None:
        """(gate, up or down; weight or bias) -> tensor; None where they are not just these."""
        named: dict[tuple[str, str], Found] = {}
        for found in tensors:
            match = re.search(r"(?:^|\.)(\w+)\.(weight|bias)$", found.tail)
            key = (_PROJECTIONS.get(match[1], ""), match[2]) if match else ("", "")
            if not key[0] or key in named or not found.is_numbered_as_usual:
                self.undecided(
                    found.pattern,
                    f"{list(found.shape)}: rules know a gate, a value and the way back, each a matrix of its own; in "
                    "what order rows of a joint matrix stand, no shape shows",
                )
                return None
            named[key] = found
        if missing := {"gate", "up", "down"} - {name for name, leaf in named if leaf == "weight"}:
            self.undecided(tensors[0].pattern, f"no matrix beside it is the {', '.join(sorted(missing))} projection")
            return None
        return named

    def _gate_evidence(self, gate: Found) -> Iterator[str]:
        yield f"width {gate.shape[0]} from the shape of {gate.tail}"
        if _numbered(gate):
            yield f"{ASSUMED}w1 is the gate, w3 what it gates, w2 the way back"

    def _activation_said(self) -> str:
        return f"activation from {self.settings.said.get('activation', 'the config')}"

    def _routed(self, experts: Sequence[Found]) -> BlockSpec | None:
        named, routers = self._by_projection(experts), self.of("router")
        if named is None:
            return None
        gate, up, down = (named[name, "weight"] for name in ("gate", "up", "down"))
        count, width = gate.experts, gate.shape[0]
        fits = gate.shape == up.shape == (width, self.hidden) and down.shape == (self.hidden, width)
        alike = len(named) == 3 and {found.experts for found in named.values()} == {count}
        if not fits or not alike or not count or len(routers) != 1 or routers[0].shape != (count, self.hidden):
            shapes = ", ".join(f"{found.tail} {list(found.shape)}" for found in (*experts, *routers))
            why = f"{shapes} are not a router and numbered experts of a gate, a value and the way back"
            self.undecided(gate.owner.rpartition(".")[0], why)
            return None
        self._held("experts", count, gate)
        self._held("expert_width" if self.settings.view.size("expert_width") else "width", width, gate)
        router = self._router(routers[0], count)
        shared = self._shared()
        if router is None or shared is None:
            return None
        gates = Concat(0, (Stored(gate.pattern), Stored(up.pattern)))
        self.sources["ffn.experts.gate_up"] = Stack("expert", count, gates)
        self.sources["ffn.experts.down"] = Stack("expert", count, Stored(down.pattern))
        bank = {"experts": count, "hidden": self.hidden, "width": width, "act": self.settings.activation()}
        block, evidence = router
        made: dict[str, Any] = {"router": block, "experts": BlockSpec(block="Experts", arguments=bank), **shared}
        evidence = [f"{count} experts from names", *self._gate_evidence(gate), self._activation_said(), *evidence]
        if "shared" in made:
            how = "times the sigmoid of its gate" if self._gate() else "as it is"
            evidence.append(f"{ASSUMED}what the shared expert gives is added {how}")
        module = routers[0].owner.rpartition(".")[0]
        return BlockSpec(block="MixtureOfExperts", arguments=made, proof=unverified(module, evidence))

    def _router(self, router: Found, count: int) -> tuple[BlockSpec, list[str]] | None:
        biases = self.of("router bias")
        self.has["router bias"] = bool(biases)
        if len(biases) > 1 or any(b.shape != (count,) or not b.leaf.endswith("correction_bias") for b in biases):
            said = ", ".join(f"{bias.tail} {list(bias.shape)}" for bias in biases)
            self.undecided(router.owner, f"{said}: no rule says whether it is of the logits or of the selection")
            return None
        top_k = self.settings.size("top_k")
        if top_k > count:
            self.undecided(router.owner, f"{top_k} of {count} experts a token, from {self.settings.said['top_k']}")
            return None
        score, said = self.settings.score(bool(biases))
        scale = self.settings.number("scale", 1.0)
        evidence = [f"{top_k} experts a token from {self.settings.said.get('top_k', 'the config')}", said]
        arguments: dict[str, Any] = {"hidden": self.hidden, "experts": count, "top_k": top_k, "score": score}
        self.sources["ffn.router.weight"] = Stored(router.pattern)
        if biases:
            arguments["selection_bias"] = True
            self.sources["ffn.router.selection_bias"] = Stored(biases[0].pattern)
            evidence.append(f"{ASSUMED}the correction bias takes part in the selection, not in the weights")
        if self.settings.renormalises():
            # Sigmoids may all vanish at once, a softmax's selection cannot.
            normalise = {"eps": 1e-20} if score == "sigmoid" else {}
            arguments["normalise"] = BlockSpec(block="Normalise", arguments=normalise)
        evidence.append(f"weights normalised or not from {self.settings.said.get('renormalise', 'the config')}")
        if scale != 1.0:
            arguments["scale"] = scale
            evidence.append(f"weights scaled from {self.settings.said['scale']}")
        return BlockSpec(block="Router", arguments=arguments), evidence

    def _gate(self) -> list[Found]:
        return self.of("shared expert gate")

    def _shared(self) -> dict[str, Any] | None:
        """The arguments that a shared expert adds; None where rules leave it open."""
        tensors, gates = self.of("shared expert"), self._gate()
        if not tensors and not gates:
            return {}
        if any(found.tail.count(".") != 3 for found in tensors) or len(gates) > 1 or not tensors:
            listed = ", ".join(found.tail for found in (*tensors, *gates))
            self.undecided("shared experts", f"{listed}: rules know one shared expert, and one gate of it")
            return None
        if gates and (gates[0].shape != (1, self.hidden) or gates[0].leaf != "weight"):
            self.undecided(gates[0].pattern, f"{list(gates[0].shape)}, expected [1, {self.hidden}]")
            return None
        block, _ = self._gated(tensors, "ffn.shared")
        if block is None:
            return None
        count, each = self.settings.view.size("shared_experts"), self.settings.view.size("expert_width")
        if self.settings.view.size("shared_width"):
            self._held("shared_width", block.arguments["width"], tensors[0])
        elif count and each and block.arguments["width"] != count * each:
            said = f"{self.settings.view.said('shared_experts')} of {self.settings.view.said('expert_width')}"
            self.undecided(
                tensors[0].pattern, f"{list(tensors[0].shape)}, expected a width of {count * each} from {said}"
            )
        if gates:
            self.sources["ffn.gate.weight"] = Stored(gates[0].pattern)
        block = block.model_copy(update={"proof": None})  # the mixture has one for all that is inside it
        return {"shared": block, **({"shared_gate": True} if gates else {})}

    def _held(self, meaning: str, size: int, shown: Found) -> None:
        """Holds a size of the config against the one that tensors show."""
        stated = self.settings.view.size(meaning)
        if stated is not None and stated != size:
            said = self.settings.view.said(meaning)
            self.undecided(shown.pattern, f"{list(shown.shape)} shows {size}, and config.json says {said}")


def norm(found: Found, settings: Settings, evidence: list[str]) -> BlockSpec:
    """An RMS norm of the stream."""
    arguments = {"width": found.shape[0], "eps": settings.number("eps")}
    said = f"eps from {settings.said.get('eps', 'the config')}, whose name says which norm it is of"
    evidence = [said, f"{ASSUMED}the weight is the factor itself, not its distance from 1", *evidence]
    return BlockSpec(block="RMSNorm", arguments=arguments, proof=unverified(found.owner, evidence))


def _numbered(found: Found) -> bool:
    return re.search(r"(?:^|\.)w\d\.weight$", found.tail) is not None
