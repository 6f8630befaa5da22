"""What a config says about its layers, held against what the tensors show.

The tensors decide. A config may add what no tensor shows (a window, an indexer that is shared); where it contradicts
them, that is a finding. Lists of layer numbers are tried from 0 and from 1: configs use both, even under one name.
"""

import re
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

from dayzero.onboard.config_fields import ConfigView
from dayzero.onboard.inspect.layer_kinds import RECURRENT, SOFTMAX, Kind
from dayzero.onboard.inspect.ledger import Finding, finding
from dayzero.onboard.inspect.tensor_names import stepped

_SPARSE = "sparse_attention"  # also the end of longer words, which say whose it is
# What a word in a per-layer list allows. `sliding` and the sparse kinds say more than tensors can.
_MIXER_WORDS: dict[str, Collection[str]] = {
    "full_attention": SOFTMAX, "attention": SOFTMAX, "sliding_attention": {"sliding"}, "chunked_attention": {"sliding"},
    "linear_attention": RECURRENT, "kda": RECURRENT, "gated_deltanet": RECURRENT, "mamba": {"state-space"},
    "mamba2": {"state-space"}, "conv": {"conv"}, "moe": {"none"}, "mlp": {"none"},
    _SPARSE: {"sparse-indexed"}, "heavily_compressed_attention": {"compressed"},
    "M": {"state-space"}, "*": SOFTMAX, "E": {"none"}, "-": {"none"},
}  # fmt: skip
_FFN_WORDS: dict[str, Collection[str]] = {
    "dense": {"dense"}, "sparse": {"routed", "hashed"}, "moe": {"routed", "hashed"}, "hash_moe": {"hashed"},
}  # fmt: skip
# Lists of layer numbers: a word in the field's name -> what the layers are.
_NUMBER_LISTS: tuple[tuple[str, Collection[str]], ...] = (
    (r"kda|linear|mamba|gdn|recurrent", RECURRENT),
    (r"full_att|attn_layer|attention_layer|softmax", SOFTMAX),
    (r"mlp_only|dense_layer", {"dense"}),
    (r"moe_layer|sparse_layer", {"routed", "hashed"}),
)
_WINDOWED = {"full", "latent"}  # what a window may turn into `sliding`


def compare(view: ConfigView, kinds: dict[int, Kind]) -> tuple[dict[int, Kind], list[Finding]]:
    """The kinds with what the config adds, and findings where the two disagree. kinds: of the language model."""
    if not kinds:
        return kinds, []
    found: list[Finding] = []
    for full, name, value in list(view.fields()):
        for step in (_words, _layer_numbers, _ratios, _counts):
            kinds = step(view, (full, name, value), kinds, found)
    return _window(view, kinds), found


Field = tuple[str, str, Any]


def _words(view: ConfigView, field: Field, kinds: dict[int, Kind], found: list[Finding]) -> dict[int, Kind]:
    """A word, a letter or a flag for every layer."""
    full, name, value = field
    if isinstance(value, str) and "pattern" in name and set(value) <= set("ME*-") and value:
        value = list(value)
    if not isinstance(value, list) or len(value) < len(kinds) or not value:
        return kinds
    if set(map(type, value)) == {int} and "attn_type" in name and set(value) <= {0, 1}:
        value = ["full_attention" if flag else "linear_attention" for flag in value]
    if set(map(type, value)) != {str}:
        return kinds
    if set(value) <= {"full", "shared"} and "index" in name:
        view.used.add(name)
        return _shared_indexers(full, value, kinds)
    if set(value) <= _FFN_WORDS.keys() and any(word in value for word in ("dense", "sparse", "hash_moe")):
        view.used.add(name)
        _judge(full, {layer: _FFN_WORDS[value[layer]] for layer in kinds if layer < len(value)}, kinds, "ffn", found)
        return kinds
    value = [_SPARSE if word.endswith(f"_{_SPARSE}") else word for word in value]
    if not set(value) & _MIXER_WORDS.keys():
        return kinds
    view.used.add(name)
    sliding = [n for n in kinds if n < len(value) and _MIXER_WORDS.get(value[n]) == {"sliding"}]
    kinds = {
        layer: kind.noting(f"{full} says {value[layer]}; no tensor shows a window", mixer="sliding")
        if layer in sliding and kind.mixer in _WINDOWED
        else kind
        for layer, kind in kinds.items()
    }
    said = {n: _MIXER_WORDS[value[n]] for n in kinds if n < len(value) and value[n] in _MIXER_WORDS}
    _judge(full, said, kinds, "mixer", found)
    return kinds


def _shared_indexers(full: str, value: list[str], kinds: dict[int, Kind]) -> dict[int, Kind]:
    return {
        layer: kind.noting(f"{full} says shared: it uses the choice of an earlier layer", mixer="sparse-indexed")
        if layer < len(value) and value[layer] == "shared" and kind.mixer in _WINDOWED
        else kind
        for layer, kind in kinds.items()
    }


def _layer_numbers(view: ConfigView, field: Field, kinds: dict[int, Kind], found: list[Finding]) -> dict[int, Kind]:
    """Numbers of the layers of one kind, counted from 0 or from 1."""
    full, name, value = field
    allowed = next((allowed for word, allowed in _NUMBER_LISTS if re.search(word, name)), None)
    if allowed is None or not isinstance(value, list) or not value or set(map(type, value)) != {int}:
        return kinds
    if len(set(value)) != len(value):
        return kinds
    view.used.add(name)
    shown = {layer for layer, kind in kinds.items() if kind.mixer in allowed or kind.ffn in allowed}
    said = set(value)
    agree = {base: len(shown & {number - base for number in said}) for base in (0, 1)}
    if shown == said:
        return kinds
    if shown == {number - 1 for number in said}:
        line = f"read from 0, {len(said) - agree[0]} of its {len(said)} numbers miss; from 1, all {len(said)} fit"
        found.append(finding("layout", f"{full} counts layers from 1", line))
        return kinds
    kind = "/".join(sorted(allowed))
    line = (
        f"it names {stepped(sorted(said))}; by their tensors the {kind} layers are {stepped(sorted(shown)) or 'none'}"
    )
    found.append(Finding(kind="contradiction", what=f"{full} does not fit the tensors", evidence=[line]))
    return kinds


def _ratios(view: ConfigView, field: Field, kinds: dict[int, Kind], found: list[Finding]) -> dict[int, Kind]:
    """How far each layer compresses keys and values, 0 for not at all."""
    full, name, value = field
    if "compress_ratio" not in name or not isinstance(value, list) or set(map(type, value)) != {int}:
        return kinds
    view.used.add(name)
    compressing = {"compressed", "sparse-indexed"}
    said = {n: compressing if value[n] else SOFTMAX - compressing for n in kinds if n < len(value)}
    _judge(full, said, kinds, "mixer", found)
    return kinds


def _counts(view: ConfigView, field: Field, kinds: dict[int, Kind], found: list[Finding]) -> dict[int, Kind]:
    """The first N layers are one thing, or every Nth."""
    full, name, value = field
    if type(value) is not int or value < 0:
        return kinds
    rules: dict[str, tuple[str, Callable[[int], Collection[str]]]] = {
        "first_k_dense_replace": ("ffn", lambda n: {"dense"} if n < value else {"routed", "hashed", "dense"}),
        "num_dense_layers": ("ffn", lambda n: {"dense"} if n < value else {"routed", "hashed", "dense"}),
        "num_hash_layers": ("ffn", lambda n: {"hashed"} if n < value else {"routed", "dense"}),
        "full_attention_interval": ("mixer", lambda n: SOFTMAX if value and (n + 1) % value == 0 else RECURRENT),
    }
    if name in {"moe_layer_freq", "decoder_sparse_step"} and value == 1:
        view.used.add(name)  # every layer may have experts, which says nothing more
    if name in rules:
        view.used.add(name)
        about, allowed = rules[name]
        _judge(f"{full}={value}", {layer: allowed(layer) for layer in kinds}, kinds, about, found)
    return kinds


def _judge(
    field: str, said: Mapping[int, Collection[str]], kinds: dict[int, Kind], about: str, found: list[Finding]
) -> None:
    """A finding if the tensors show something else than the config says."""
    wrong = [layer for layer, allowed in said.items() if getattr(kinds[layer], about) not in {*allowed, "unknown"}]
    if not wrong:
        return
    shown = Counter(getattr(kinds[layer], about) for layer in wrong)
    first = wrong[0]
    line = (
        f"layers {stepped(wrong)}: it says {'/'.join(sorted(said[first]))}, their tensors show "
        f"{', '.join(shown)}; layer {first} {'; '.join(kinds[first].evidence)}"
    )
    found.append(finding("contradiction", f"{field} does not fit the tensors", line))


def _window(view: ConfigView, kinds: dict[int, Kind]) -> dict[int, Kind]:
    """A window that the config gives without saying for which layers."""
    window, used = view.size("window"), view.get("use_sliding_window")
    if not window or used is False or any(kind.mixer == "sliding" for kind in kinds.values()):
        return kinds
    if isinstance(view.text.get("layer_types"), list):
        return kinds
    first, pattern = view.get("max_window_layers"), view.get("sliding_window_pattern")
    compresses = any(kind.mixer == "compressed" for kind in kinds.values())

    def slides(layer: int, kind: Kind) -> bool:
        if kind.mixer not in _WINDOWED or (kind.mixer == "latent" and not compresses):
            return False
        if type(pattern) is int and pattern > 0:
            return (layer + 1) % pattern != 0
        return not (used and type(first) is int and layer < first)

    return {
        layer: kind.noting(f"{view.said('window')}; no tensor shows a window", mixer="sliding")
        if slides(layer, kind)
        else kind
        for layer, kind in kinds.items()
    }
