"""A tiny model of the same kind: few layers that still cover every kind, small sizes that no two of agree.

A wrong transposition or swap must not fit by accident, so every size that could meet another in a shape is different
from it, and none of the matrices is square where the architecture allows it. What the architecture allows is found by
trying: the small reference must build, run, and have the tensors of the real one, layer by layer.
"""

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from dayzero.onboard.config_fields import SIZES
from dayzero.onboard.oracle.reference import build
from dayzero.onboard.shrink.canonical_config import canonical
from dayzero.onboard.shrink.layers import (
    Cut,
    cut_layers,
    encoder_signatures,
    followed,
    kind_of,
    layer_list,
    layer_signatures,
    layers_to_cover,
    part_signature,
)
from dayzero.onboard.shrink.loops import handed_alike
from dayzero.onboard.shrink.sizes import NoSmallSizes, small_sizes
from dayzero.onboard.shrink.trial import FAILURES, SEQUENCE, Trial, trial

__all__ = [
    "SEQUENCE",
    "NoSmallSizes",
    "Shrunk",
    "layer_signatures",
    "layers_to_cover",
    "part_signature",
    "shrink",
    "shrink_model",
    "text_path",
]


_MORE = (2, 3, 4)  # layers of a kind, where one of each that runs again is handed nothing that differs


@dataclass(frozen=True)
class Shrunk:
    """config: the small one. full: the real one in the same spelling, field for field, with the same layers only.
    kept[i]: the real layer that small layer i is. follows[n]: the small layer that stands for real layer n."""

    config: dict[str, Any]
    full: dict[str, Any]
    kept: list[int]
    follows: list[int]


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """The small config. See `shrink_model`."""
    return shrink_model(config).config


def shrink_model(config: Mapping[str, Any], tell: Callable[[str], None] = lambda line: None) -> Shrunk:
    """The small config and which real layer each of its layers is.

    Builds the real model on the meta device to see its layers. Raises UnknownArchitecture for a model without a list of
    layers or one that cannot be cut, InputError for a config that makes none, NoSmallSizes.
    """
    complete = canonical(config)
    complete.pop("quantization_config", None)
    model, _ = build(complete, device="meta")
    text = text_path(complete, len(layer_list(model)))
    signatures, encoder = layer_signatures(model), encoder_signatures(model)
    cut = cut_layers(complete, text, signatures, encoder)
    small, again = _small(cut, text, tell)
    alike = {kind_of(signatures[cut.kept[place]]) for place in (handed_alike(small) if again else ())}
    for count in _MORE if alike else ():
        more = cut_layers(complete, text, signatures, encoder, dict.fromkeys(alike, count))
        with contextlib.suppress(NoSmallSizes):
            larger, _ = _small(more, text, tell)
            if not handed_alike(larger):
                tell(f"{len(more.kept)} layers, not {len(cut.kept)}, of which all that a pass hands on is the same")
                cut, small = more, larger
                break
    return Shrunk(small, cut.config, cut.kept, followed(signatures, cut.kept))


def _small(cut: Cut, text: tuple[str, ...], tell: Callable[[str], None]) -> tuple[dict[str, Any], bool]:
    """The config of the cut at small sizes, and whether layers of its model run more than once. Raises NoSmallSizes."""
    wanted, again = _tensors(cut.model), False

    def matters(changed: Mapping[str, Any]) -> bool:
        try:
            other, _ = build(changed, device="meta")
        except FAILURES:
            return True
        return [p.shape for p in other.parameters()] != [p.shape for p in cut.model.parameters()]

    def same(small: nn.Module) -> str:
        found = _tensors(small)
        differing = sorted(str(entry) for entry in found ^ wanted)
        return f"it differs in {len(differing)} tensors, {differing[0]} first" if differing else ""

    def collisions(changed: Mapping[str, Any]) -> set[int]:
        try:
            return _collisions(build(changed, device="meta")[0], cut.model)
        except FAILURES:
            return set(range(1000))

    def attempt(config: Mapping[str, Any]) -> Trial:
        nonlocal again
        made = trial(config, same)
        again = again or made.again
        return made

    start = _with_small_tokens(cut.config)
    return small_sizes(start, text, cut.numbered, matters, attempt, collisions, tell), again


def _tensors(model: nn.Module) -> set[tuple[Any, ...]]:
    """What must be the same in the small model: the tensors of the layers, by name and rank, numbers inside a layer
    (of experts, say) aside; and the other parameters likewise."""
    found: set[tuple[Any, ...]] = set()
    for index, signature in enumerate(layer_signatures(model)):
        found |= {(index, *entry) for entry in kind_of(signature) if entry[0].startswith("shape of ")}
    return found


def _collisions(small: nn.Module, real: nn.Module) -> set[int]:
    """Dimensions of the small layers' tensors that stand for different dimensions of the real ones."""
    means: dict[int, set[int]] = {}
    there = dict(layer_list(real).named_parameters())
    for name, parameter in layer_list(small).named_parameters():
        if name in there:
            for one, other in zip(parameter.shape, there[name].shape, strict=True):
                means.setdefault(one, set()).add(other)
    return {one for one, others in means.items() if len(others) > 1}


def text_path(config: Mapping[str, Any], layers: int) -> tuple[str, ...]:
    """Where in the config the language model is described: () for the whole, or the path of the nested part.

    layers: how many the language model has. Of the parts that say so, the shallowest, and of those the one with a
    vocabulary.
    """
    found: list[tuple[int, bool, tuple[str, ...]]] = []

    def walk(part: Mapping[str, Any], path: tuple[str, ...]) -> None:
        counts = any(part.get(name) == layers for name in SIZES["layers"])
        lists = any(isinstance(value, list) and len(value) == layers for value in part.values())
        if counts or lists or part.get("vocab_size"):
            found.append((not part.get("vocab_size"), not counts, path))
        for name, value in part.items():
            if isinstance(value, Mapping):
                walk(value, (*path, name))

    walk(config, ())
    return min(found, key=lambda entry: (entry[0], entry[1], len(entry[2])))[2] if found else ()


def _with_small_tokens(config: Mapping[str, Any]) -> dict[str, Any]:
    """Token ids that fit any vocabulary, in every part of the config."""
    made: dict[str, Any] = {}
    for key, value in config.items():
        name = str(key)
        if isinstance(value, Mapping):
            made[key] = _with_small_tokens(value)
        elif name.endswith(("token_id", "token_index")) and type(value) is int:
            made[key] = min(value, 2) if name.startswith(("bos", "eos", "pad")) else value
        elif name.endswith("token_id") and isinstance(value, list):
            made[key] = [1]
        else:
            made[key] = value
    return made
