"""What a proven model shows, layer by layer, in the words that claims are checked with."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cached_property
from typing import Any, Literal, NamedTuple

from dayzero.onboard.inspect.tensor_names import stepped
from dayzero.runtime import nn
from dayzero.runtime.block_spec import BlockSpec
from dayzero.runtime.nn.router import Routing
from dayzero.runtime.spec import LayerKind, ModelSpec

_ATTENDING = {"GroupedQueryAttention", "LatentAttention", "CompressedAttention"}
_STATE_SPACE = {"Mamba", "Mamba2"}
_RECURRENT = {"GatedDeltaNet", "LightningAttention", "MLSTM", "TimeMix", "RecurrentBlock", *_STATE_SPACE}
_CONVOLVING = {"GatedShortConvolution"}
_DENSE = {"GatedFeedForward", "FeedForward", "ChannelMix"}
_NORMS = {"RMSNorm", "LayerNorm", "ScaledFirstRMSNorm", "SelfGatedRMSNorm"}

Way = Literal["attends", "recurs", "convolves", "several", "neither"]


class Verdict(NamedTuple):
    """What the proof says of a claim. by: what decides a size is the tensors' shapes, and what nobody computes with is
    beside the point."""

    holds: bool
    proven: str
    by: Literal["proof", "tensors", "reason"] = "proof"


def argument(block: BlockSpec, name: str) -> Any:
    """An argument of a block, the constructor's default where it is not given; None where it has no such argument."""
    if name in block.arguments:
        return block.arguments[name]
    parameter = inspect.signature(nn.BLOCKS[block.block].__init__).parameters.get(name)
    return None if parameter is None or parameter.default is inspect.Parameter.empty else parameter.default


class Layer:
    """One kind of layer. Facts that copied code may hide are None."""

    def __init__(self, kind: LayerKind):
        self.blocks = [block for part in kind.all_parts for block in part.block.walk()]
        self.outer = [part.block for part in kind.all_parts]
        copied = [part.name for part in kind.all_parts if any(b.block == "Lifted" for b in part.block.walk())]
        self.mixer_hidden = any(not name.startswith("ffn") and "norm" not in name for name in copied)
        self.ffn_hidden = any(not name.startswith("mixer") and "norm" not in name for name in copied)

    def of(self, names: Iterable[str]) -> list[BlockSpec]:
        """Its blocks of these classes, those inside others too."""
        return [block for block in self.blocks if block.block in names]

    @cached_property
    def attentions(self) -> list[BlockSpec]:
        """Those whose heads, windows and gates have the same names; an attention whose heads are experts has not."""
        return self.of(_ATTENDING)

    @cached_property
    def recurrences(self) -> list[BlockSpec]:
        return self.of(_RECURRENT)

    @cached_property
    def state_spaces(self) -> list[BlockSpec]:
        return self.of(_STATE_SPACE)

    @cached_property
    def mixtures(self) -> list[BlockSpec]:
        """Feed-forward layers of experts; an attention may have experts as well."""
        return self.of({"MixtureOfExperts"})

    @cached_property
    def routers(self) -> list[BlockSpec]:
        """What chooses experts; not what is handed a choice."""
        routing = [block for block in self.blocks if issubclass(nn.BLOCKS[block.block], Routing)]
        return [block for block in routing if block.block != "HandedRouting"]

    @cached_property
    def indexers(self) -> list[BlockSpec]:
        return [block for block in self.blocks if block.block.endswith("Indexer")]

    @cached_property
    def norms(self) -> list[BlockSpec]:
        """Of the stream; norms inside other blocks are theirs."""
        inside = [argument(block, "norm") for block in self.of({"HyperConnected"})]
        return [block for block in (*self.outer, *inside) if isinstance(block, BlockSpec) and block.block in _NORMS]

    @cached_property
    def routed(self) -> bool | None:
        return True if self.mixtures else None if self.ffn_hidden else False

    @cached_property
    def hashed(self) -> bool | None:
        return bool(self.of({"HashRouter"})) if self.routed is not None else None

    @cached_property
    def dense_layers(self) -> list[BlockSpec]:
        """Its feed-forward layers that are no experts and not shared beside experts."""
        beside = [argument(block, "shared") for block in self.mixtures]
        return [block for block in self.of(_DENSE) if not any(block is shared for shared in beside)]

    @cached_property
    def dense(self) -> bool | None:
        return True if self.dense_layers else None if self.ffn_hidden else False

    @cached_property
    def way(self) -> Way | None:
        """How its tokens see other tokens."""
        kinds: list[tuple[Way, list[BlockSpec]]] = [
            ("attends", self.attentions or self.of({"MixtureOfAttention"})),
            ("recurs", self.recurrences),
            ("convolves", self.of(_CONVOLVING)),
        ]
        there: list[Way] = [way for way, blocks in kinds if blocks]
        if self.mixer_hidden and len(there) != 1:
            return None
        return "neither" if not there else there[0] if len(there) == 1 else "several"

    @cached_property
    def window(self) -> int | None:
        return next((w for block in self.attentions if (w := argument(block, "window")) is not None), None)

    @cached_property
    def chunk(self) -> int | None:
        return next((c for block in self.attentions if (c := argument(block, "chunk")) is not None), None)

    @cached_property
    def rate(self) -> int:
        """Tokens that become one entry of compressed keys; 0 where nothing is compressed."""
        return next((argument(block, "rate") for block in self.of({"Compressor"})), 0)


class Shown:
    """The proven model beside the config that makes claims about it. config: the part of the text decoder. defaults:
    what the config's class adds to it."""

    def __init__(self, spec: ModelSpec, config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None):
        self.spec, self.config, self.defaults = spec, config, defaults or {}
        kinds = [Layer(kind) for kind in spec.layer_kinds]
        self.layers = [kinds[run.kind] for run in spec.layers for _ in range(run.count)]
        self.kinds = kinds

    @property
    def count(self) -> int:
        return len(self.layers)

    def stated(self, *names: str) -> Any:
        """What the config says under the first of these names that it has."""
        return next((self.config[name] for name in names if self.config.get(name) is not None), None)

    def assumed(self, name: str) -> Any:
        """What the config says, or its class where it says nothing."""
        return self.config[name] if name in self.config else self.defaults.get(name)

    def entries(self, value: Any) -> Any:
        """A list with one entry a layer without the entries of layers that predict further tokens; None where its
        length is neither."""
        further = self.stated("num_nextn_predict_layers", "num_mtp_modules", "mtp_num_hidden_layers")
        most = self.count + max(1, further if type(further) is int else 1)
        return value[: self.count] if self.count <= len(value) <= most else None

    def blocks(self, of: Callable[[Layer], list[BlockSpec]], where: Callable[[Layer], Any] | None = None):
        """Distinct kinds' blocks; where: only of layers of which this holds."""
        return [block for kind in self.kinds if where is None or where(kind) for block in of(kind)]

    @property
    def hides_mixers(self) -> bool:
        return any(kind.mixer_hidden for kind in self.kinds)

    @property
    def hides_ffns(self) -> bool:
        return any(kind.ffn_hidden for kind in self.kinds)

    def table(self, block: BlockSpec) -> BlockSpec | None:
        """The rotary table that a block turns by; None where it turns nothing."""
        if argument(block, "rotary") is None or not self.spec.rotaries:
            return None
        return self.spec.rotaries[argument(block, "table") or 0]


def by_layer(
    shown: Shown, said: Mapping[int, Any], fact: Callable[[Layer], Any], word: Callable[[Any], str] = str
) -> Verdict | None:
    """Whether what is said of layers is what they show. word: a fact in words. None where copied code hides it."""
    found = {index: fact(shown.layers[index]) for index in said}
    wrong = [index for index in said if found[index] is not None and found[index] != said[index]]
    if wrong:
        return Verdict(False, described({index: found[index] for index in wrong}, word))
    if None in found.values():
        return None
    return Verdict(True, described(found, word))


def described(found: Mapping[int, Any], word: Callable[[Any], str] = str) -> str:
    """`layers 0-2: dense; layers 3-60: routed`."""
    layers: dict[str, list[int]] = {}
    for index, fact in sorted(found.items()):
        layers.setdefault(word(fact), []).append(index)
    lines = [f"layer{'s' if len(numbers) > 1 else ''} {stepped(numbers)}: {fact}" for fact, numbers in layers.items()]
    return "; ".join(lines) or "no layer is concerned"


def wrong_length(shown: Shown, value: Any) -> Verdict:
    """A list that has not one entry a layer."""
    return Verdict(False, f"{shown.count} layers, and {len(value)} entries for them")


def all_are(
    value: Any, found: Iterable[Any], what: str, hidden: bool, by: Literal["proof", "tensors"] = "proof"
) -> Verdict | None:
    """Whether every one of `found`, facts of blocks, is the value. hidden: copied code may hold more of them."""
    facts = list(dict.fromkeys(found))
    if facts and all(_same(fact, value) for fact in facts):
        return None if hidden else Verdict(True, f"{what}: {_words(facts)}", by)
    if facts:
        return Verdict(False, f"{what}: {_words(facts)}", by)
    return None if hidden else Verdict(True, f"{what}: none is in the model", "reason")


def _same(fact: Any, value: Any) -> bool:
    """Numbers by value, for 10000 may stand for 10000.0; everything else by type too."""
    if type(fact) in (int, float) and type(value) in (int, float):
        return float(fact) == float(value)
    return type(fact) is type(value) and fact == value


def _words(facts: Iterable[Any]) -> str:
    words = {True: "yes", False: "no", None: "none"}
    return ", ".join(words[fact] if fact is None or isinstance(fact, bool) else str(fact) for fact in facts)
