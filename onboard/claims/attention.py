"""Claims about attention: gates, norms, sinks, and how positions enter."""

from collections.abc import Callable
from typing import Any

from dayzero.onboard.claims.shown import Layer, Shown, Verdict, all_are, argument, by_layer, wrong_length
from dayzero.runtime.block_spec import BlockSpec


def _attentions(shown: Shown, where: Callable[[Layer], Any] | None = None) -> list[BlockSpec]:
    return shown.blocks(lambda layer: layer.attentions, where)


def _windowed(layer: Layer) -> bool:
    return layer.window is not None


def _unwindowed(layer: Layer) -> bool:
    return layer.window is None


def gate(value: Any, shown: Shown) -> Verdict | None:
    """Whether what a head gathers is gated by the layer's input."""
    if type(value) is not bool:
        return None
    found = [argument(block, "gate") is not None for block in _attentions(shown)]
    return all_are(value, found, "attention has a gate", shown.hides_mixers)


def full_rank_gate(value: Any, shown: Shown) -> Verdict | None:
    """Whether the gate of a recurrence is one matrix, rather than a product of two."""
    if type(value) is not bool:
        return None
    found = [argument(block, "gate_rank") is None for block in shown.blocks(lambda layer: layer.of({"GatedDeltaNet"}))]
    return all_are(value, found, "the gate is one matrix", shown.hides_mixers)


def gate_bound(value: Any, shown: Shown) -> Verdict | None:
    """The bound that a logarithmic decay does not pass."""
    found = [argument(block, "bound") for block in shown.blocks(lambda layer: layer.of({"GatedDeltaNet"}))]
    return all_are(value, found, "bound of the decay", shown.hides_mixers)


def query_key_norm(value: Any, shown: Shown) -> Verdict | None:
    """Whether queries and keys are normed."""
    if type(value) is not bool:
        return None
    found = [block for block in _attentions(shown) if block.block == "GroupedQueryAttention"]
    if len(found) != len(_attentions(shown)):
        return None  # latents are always normed; which of their norms is meant, the name does not say
    return all_are(value, [argument(b, "qk_norm") != "none" for b in found], "query-key norm", shown.hides_mixers)


def query_key_norm_over(value: Any, shown: Shown) -> Verdict | None:
    """qk_norm_type: over the whole vector of a layer, or over each head."""
    over = {"per_layer": "whole", "per_head": "head"}
    if value not in over:
        return None
    found = [argument(block, "qk_norm") for block in _attentions(shown)]
    verdict = all_are(over[value], found, "query-key norm", shown.hides_mixers)
    if shown.config.get("use_qk_norm") is False and set(found) == {"none"}:
        return Verdict(True, "no query-key norm, as use_qk_norm says", "reason")
    return verdict


def full_sinks(value: Any, shown: Shown) -> Verdict | None:
    """Sinks in the layers that attend to everything."""
    return _sinks(value, shown, _unwindowed, "sinks where there is no window")


def window_sinks(value: Any, shown: Shown) -> Verdict | None:
    """Sinks in the layers that attend to a window."""
    return _sinks(value, shown, _windowed, "sinks where there is a window")


def _sinks(value: Any, shown: Shown, where: Callable[[Layer], bool], what: str) -> Verdict | None:
    if type(value) is not bool:
        return None
    found = [bool(argument(block, "sinks")) for block in _attentions(shown, where)]
    return all_are(value, found, what, shown.hides_mixers)


def interleaved(value: Any, shown: Shown) -> Verdict | None:
    """Whether channels side by side turn together, rather than those one half apart."""
    return _interleaved(value, shown, _attentions(shown), "attention turns channels side by side")


def indexer_interleaved(value: Any, shown: Shown) -> Verdict | None:
    """The same of indexers."""
    indexers = shown.blocks(lambda layer: layer.indexers)
    found = [argument(b, "compressor") or b for b in indexers]
    return _interleaved(value, shown, found, "indexers turn channels side by side")


def _interleaved(value: Any, shown: Shown, blocks: list[BlockSpec], what: str) -> Verdict | None:
    if type(value) is not bool:
        return None
    styles = [style for block in blocks if (style := argument(block, "rotary")) is not None]
    return all_are(value, [style != "half" for style in styles], what, shown.hides_mixers)


def no_positions(value: Any, shown: Shown) -> Verdict | None:
    """mla_use_nope: attention over latents turns nothing."""
    if type(value) is not bool:
        return None
    blocks = [block for block in _attentions(shown) if block.block == "LatentAttention"]
    found = [argument(block, "rotary") is None for block in blocks]
    return all_are(value, found, "attention without positions", shown.hides_mixers)


def position_flags(value: Any, shown: Shown) -> Verdict | None:
    """no_rope_layers: for every layer 1 where positions turn, 0 where they do not."""
    if not isinstance(value, list) or not value or not set(value) <= {0, 1}:
        return None
    entries = shown.entries(value)
    if entries is None:
        return wrong_length(shown, value)
    return _turning(shown, {index: bool(flag) for index, flag in enumerate(entries)})


def position_interval(value: Any, shown: Shown) -> Verdict | None:
    """no_rope_layer_interval: the last of every so many layers has no positions."""
    if type(value) is not int or value < 1:
        return None
    return _turning(shown, {index: (index + 1) % value != 0 for index in range(shown.count)})


def _turning(shown: Shown, said: dict[int, bool]) -> Verdict | None:
    def turns(layer: Layer) -> bool | None:
        if not layer.attentions:
            return None if layer.mixer_hidden else False
        return any(argument(block, "rotary") is not None for block in layer.attentions)

    return by_layer(shown, said, turns, lambda fact: "positions turn" if fact else "no positions")


def base(value: Any, shown: Shown) -> Verdict | None:
    """The rotary base, of the layers without a window where some have one."""
    return _base(value, shown, _unwindowed if _attentions(shown, _unwindowed) else _windowed, "rotary base")


def window_base(value: Any, shown: Shown) -> Verdict | None:
    """The rotary base of the layers with a window."""
    return _base(value, shown, _windowed, "rotary base where there is a window")


def _base(value: Any, shown: Shown, where: Callable[[Layer], bool], what: str) -> Verdict | None:
    tables = [table for block in _attentions(shown, where) if (table := shown.table(block)) is not None]
    return all_are(value, [argument(table, "theta") for table in tables], what, shown.hides_mixers)


def compressed_base(value: Any, shown: Shown) -> Verdict | None:
    """The rotary base of compressed entries."""
    blocks = shown.blocks(lambda layer: layer.of({"Compressor"}))
    tables = [table for block in blocks if (table := shown.table(block)) is not None]
    found = [argument(table, "theta") for table in tables]
    return all_are(value, found, "rotary base of compressed entries", shown.hides_mixers)


def turned_channels(value: Any, shown: Shown) -> Verdict | None:
    """Channels of a head that turn."""
    found = []
    for block in _attentions(shown):
        if block.block == "LatentAttention":
            found.append(argument(block, "rope_dim"))
        elif (table := shown.table(block)) is not None:
            found.append(argument(table, "dim"))
    return all_are(value, found, "channels that turn", shown.hides_mixers)


def turned_part(value: Any, shown: Shown) -> Verdict | None:
    """The part of a head's channels that turns, as whole pairs."""
    if type(value) not in (int, float):
        return None
    found = []
    for block in _attentions(shown):
        size = argument(block, "head_dim")
        if size is not None and (table := shown.table(block)) is not None:
            turned = argument(table, "rotated")
            turned = argument(table, "dim") if turned is None else 2 * turned
            found.append(value if turned in (int(size * value), 2 * round(size * value / 2)) else turned / size)
    return all_are(value, found, "part of a head that turns", shown.hides_mixers)


def original_length(value: Any, shown: Shown) -> Verdict | None:
    """The length that positions were stretched from; where none are, the length that the config allows."""
    lengths = [argument(rotary, "original_length") for rotary in shown.spec.rotaries]
    stretched = [length for length in lengths if length is not None]
    if stretched or not lengths:
        return all_are(value, stretched, "original length of the rotary scaling", shown.hides_mixers)
    return all_are(value, [shown.spec.max_positions], "no scaling; positions allowed", shown.hides_mixers)


def norm_eps(value: Any, shown: Shown) -> Verdict | None:
    """The epsilon of the norms of the stream."""
    norms = [*shown.blocks(lambda layer: layer.norms), shown.spec.norm]
    found = [argument(norm, "eps") for norm in norms if argument(norm, "eps") is not None]
    return all_are(value, found, "epsilon of the layers' norms", False)


def state_dtype(value: Any, shown: Shown) -> Verdict | None:
    """The precision of recurrent states: float32 at least is how ours compute."""
    if not isinstance(value, str):
        return None
    if not shown.blocks(lambda layer: layer.recurrences):
        return all_are(value, [], "recurrent states", shown.hides_mixers)
    right = value in ("float32", "fp32", "torch.float32")
    return None if shown.hides_mixers else Verdict(right, "states are computed in float32 at least")


def shared_index(value: Any, shown: Shown) -> Verdict | None:
    """index_topk_freq, index_skip_topk_offset: after the first layers every so many choose tokens, the rest reuse."""
    if type(value) is not int:
        return None
    if shown.stated("index_topk_pattern") is not None:
        return Verdict(True, "index_topk_pattern says which layers choose", "reason")
    every, skipped = shown.stated("index_topk_freq"), shown.stated("index_skip_topk_offset")
    if type(every) is not int or every < 1:
        return None
    skipped = skipped if type(skipped) is int else 2
    return _choosing(shown, {i: max(i - skipped + 1, 0) % every == 0 for i in range(shown.count)})


def index_pattern(value: Any, shown: Shown) -> Verdict | None:
    """index_topk_pattern: a letter or a word a layer, F(ull) where it chooses tokens, S(hared) where it reuses."""
    if value is None:
        return Verdict(True, "no pattern is stated", "reason")
    first = [str(entry)[:1].upper() for entry in value] if isinstance(value, str | list) else []
    if not first or not set(first) <= {"F", "S"}:
        return None
    entries = shown.entries(first)
    if entries is None:
        return wrong_length(shown, first)
    return _choosing(shown, {index: letter == "F" for index, letter in enumerate(entries)})


def _choosing(shown: Shown, said: dict[int, bool]) -> Verdict | None:
    """Whether each layer has an indexer of its own."""
    if not any(layer.indexers for layer in shown.kinds):
        return all_are(True, [], "indexers", shown.hides_mixers)
    return by_layer(
        shown,
        said,
        lambda layer: None if layer.mixer_hidden and not layer.indexers else bool(layer.indexers),
        lambda fact: "chooses tokens" if fact else "reuses the choice of an earlier layer",
    )


def indexed_tokens(value: Any, shown: Shown) -> Verdict | None:
    """Tokens that an indexer leaves."""
    found = [argument(block, "top_k") or argument(block, "budget") for block in shown.blocks(lambda k: k.indexers)]
    return all_are(value, found, "tokens an indexer leaves", shown.hides_mixers)
