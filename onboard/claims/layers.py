"""Claims about which layer is what: which attend, which recur, to what window."""

from collections.abc import Callable
from typing import Any

from dayzero.onboard.claims.shown import Layer, Shown, Verdict, all_are, by_layer, described, wrong_length

# A word for a layer -> whether a layer is that; None where copied code hides it.
_WORDS: dict[str, Callable[[Layer], bool | None]] = {
    "full_attention": lambda layer: _way(layer, "attends") and layer.window is None and layer.chunk is None,
    "attention": lambda layer: _way(layer, "attends"),
    "sliding_attention": lambda layer: _way(layer, "attends") and layer.window is not None,
    "chunked_attention": lambda layer: _way(layer, "attends") and layer.chunk is not None,
    "linear_attention": lambda layer: _way(layer, "recurs"),
    "recurrent": lambda layer: _way(layer, "recurs"),
    "mamba": lambda layer: _way(layer, "recurs") and bool(layer.state_spaces),
    "mamba2": lambda layer: _way(layer, "recurs") and bool(layer.state_spaces),
    "conv": lambda layer: _way(layer, "convolves"),
    "moe": lambda layer: layer.routed,
    "sparse": lambda layer: layer.routed,
    "hash_moe": lambda layer: layer.hashed,
    "mlp": lambda layer: layer.dense,
    "dense": lambda layer: layer.dense,
}
_LETTERS = {"M": "mamba", "*": "attention", "E": "moe", "-": "mlp"}


def _way(layer: Layer, way: str) -> bool | None:
    return None if layer.way is None else layer.way == way


def _describe(layer: Layer) -> str:
    """A layer in a few words."""
    words = [str(layer.way)] if layer.way not in ("neither", None) else []
    words += [f"to a window of {layer.window}"] if layer.window is not None else []
    words += [f"in chunks of {layer.chunk}"] if layer.chunk is not None else []
    words += ["is routed"] if layer.routed else []
    words += ["is dense"] if layer.dense else []
    return " and ".join(words).replace(" and to", " to").replace(" and in", " in") or "copied code"


def _hold(shown: Shown, said: dict[int, str]) -> Verdict | None:
    """Whether each layer is what a word says of it."""
    found = {index: _WORDS[word](shown.layers[index]) for index, word in said.items()}
    wrong = [index for index, holds in found.items() if holds is False]
    if not wrong and None in found.values():
        return None
    return Verdict(not wrong, described({index: shown.layers[index] for index in wrong or said}, _describe))


def words(value: Any, shown: Shown) -> Verdict | None:
    """A word for every layer."""
    if not isinstance(value, list) or not value or not all(isinstance(word, str) for word in value):
        return None
    if not set(value) <= _WORDS.keys():
        return None
    entries = shown.entries(value)
    return wrong_length(shown, value) if entries is None else _hold(shown, dict(enumerate(entries)))


def letters(value: Any, shown: Shown) -> Verdict | None:
    """hybrid_override_pattern: a letter a layer, M a state space, * attention, E experts, - a feed-forward layer."""
    if not isinstance(value, str):
        return None
    value = value.replace("|", "")  # where a pipeline is cut
    if not value or not set(value) <= _LETTERS.keys():
        return None
    entries = shown.entries(value)
    if entries is None:
        return wrong_length(shown, value)
    return _hold(shown, {index: _LETTERS[letter] for index, letter in enumerate(entries)})


def _every(value: Any, shown: Shown, last: str, others: str) -> Verdict | None:
    """The last of every `value` layers is of one kind, the others of another."""
    if type(value) is not int or value < 1:
        return None
    return _hold(shown, {index: others if (index + 1) % value else last for index in range(shown.count)})


def interval(value: Any, shown: Shown) -> Verdict | None:
    """full_attention_interval: the last of every so many layers attends, the others recur."""
    return _every(value, shown, "attention", "linear_attention")


def attend_flags(value: Any, shown: Shown) -> Verdict | None:
    """attn_type_list: 1 for layers that attend, 0 for those that recur."""
    return _flags(value, shown, {0: "linear_attention", 1: "attention"})


def window_flags(value: Any, shown: Shown) -> Verdict | None:
    """hybrid_layer_pattern: 1 for layers that attend to a window, 0 for those that attend to all."""
    return _flags(value, shown, {0: "full_attention", 1: "sliding_attention"})


def _flags(value: Any, shown: Shown, meaning: dict[int, str]) -> Verdict | None:
    if not isinstance(value, list) or not value or any(type(flag) not in (int, bool) for flag in value):
        return None
    if not set(value) <= meaning.keys():
        return None
    entries = shown.entries(value)
    if entries is None:
        return wrong_length(shown, value)
    return _hold(shown, {index: meaning[flag] for index, flag in enumerate(entries)})


def attending_numbers(value: Any, shown: Shown) -> Verdict | None:
    """Numbers of the layers that attend; by this name they count from 1, unless 0 is among them all."""
    return _numbers(value, shown, "attends")


def recurring_numbers(value: Any, shown: Shown) -> Verdict | None:
    """Numbers of the layers that recur, counted likewise."""
    return _numbers(value, shown, "recurs")


def _numbers(value: Any, shown: Shown, way: str) -> Verdict | None:
    if not isinstance(value, list) or any(type(number) is not int for number in value):
        return None
    nested = shown.stated("linear_attn_config") or {}
    every = {n for name, held in nested.items() if name.endswith("_layers") and isinstance(held, list) for n in held}
    first = 0 if 0 in every | set(value) else 1
    named = {number - first for number in value}
    if not named <= set(range(shown.count)):
        return Verdict(False, f"{shown.count} layers, numbers from {min(value)} to {max(value)}")
    said = {index: index in named for index in range(shown.count)}
    return by_layer(shown, said, lambda layer: _way(layer, way), lambda fact: way if fact else "otherwise")


def window(value: Any, shown: Shown) -> Verdict | None:
    """How many tokens a token sees in the layers that see a window; None for no such layer."""
    if value is not None and type(value) is not int:
        return None
    found = {kind.window for kind in shown.kinds if kind.attentions}
    if found == {None} and (why := _nowhere(shown)):
        return Verdict(True, f"no layer has a window, as {why} says")
    return all_are(value, found - {None} or found, "windows", shown.hides_mixers)


def _nowhere(shown: Shown) -> str | None:
    """The field by which a window that the config states belongs to no layer."""
    first, kinds = shown.assumed("max_window_layers"), shown.stated("layer_types")
    if shown.assumed("use_sliding_window") is False:
        return "use_sliding_window"
    if type(first) is int and first >= shown.count:
        return "max_window_layers"
    return "layer_types" if isinstance(kinds, list) and "sliding_attention" not in kinds else None


def window_before(value: Any, shown: Shown) -> Verdict | None:
    """sliding_window_size: as `window`, or the tokens before the token itself; both are in use."""
    verdict = window(value, shown)
    if type(value) is int and verdict is not None and not verdict.holds:
        beside = window(value + 1, shown)
        verdict = beside if beside is not None and beside.holds else verdict
    return verdict


def windows_used(value: Any, shown: Shown) -> Verdict | None:
    """use_sliding_window."""
    if type(value) is not bool:
        return None
    windowed = any(kind.window is not None for kind in shown.kinds)
    return all_are(value, [windowed], "a layer with a window", shown.hides_mixers)


def first_windowed(value: Any, shown: Shown) -> Verdict | None:
    """max_window_layers: from this layer on layers see a window, where any does."""
    if type(value) is not int:
        return None
    if not any(kind.window is not None for kind in shown.kinds):
        return None if shown.hides_mixers else Verdict(True, "no layer has a window", "reason")
    said = {i: "full_attention" if i < value else "sliding_attention" for i in range(shown.count)}
    return _hold(shown, said)


def window_interval(value: Any, shown: Shown) -> Verdict | None:
    """sliding_window_pattern: all but the last of every so many layers see a window."""
    return _every(value, shown, "full_attention", "sliding_attention")


def chunk(value: Any, shown: Shown) -> Verdict | None:
    """Tokens of a chunk, in the layers that attend within chunks; None for no such layer."""
    if value is not None and type(value) is not int:
        return None
    found = {kind.chunk for kind in shown.kinds if kind.attentions}
    return all_are(value, found - {None} or found, "chunks of attention", shown.hides_mixers)


def compression(value: Any, shown: Shown) -> Verdict | None:
    """compress_ratios: how many tokens become one entry in each layer, 0 where none do."""
    if not isinstance(value, list) or any(type(rate) is not int for rate in value):
        return None
    entries = shown.entries(value)
    if entries is None:
        return wrong_length(shown, value)
    return by_layer(
        shown,
        dict(enumerate(entries)),
        lambda layer: None if layer.mixer_hidden else layer.rate,
        lambda rate: f"{rate} tokens an entry" if rate else "nothing compressed",
    )
