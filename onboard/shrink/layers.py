"""Which layers a small model keeps: one of every kind, as they come in the real one.

The shortest prefix that has every kind is kept; where kinds are far apart, single layers are taken from all over and
the lists of the config rewritten. Either is only believed if the layers of the model that comes out are those that
were wanted.
"""

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from torch import nn

from dayzero.onboard.config_fields import SIZES
from dayzero.onboard.oracle.reference import UnknownArchitecture, build, encoder_path, text_config
from dayzero.runtime.errors import InputError

Signature = tuple[tuple[str, Any], ...]
PREFIX = 6  # layers of a prefix that are kept without trying for fewer
MOST_LAYERS = 12
_COUNTS = {*SIZES["layers"], "encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"}


def layer_list(model: nn.Module) -> nn.ModuleList:
    """The layers of the language model: of the lists beside its embedding that no other list holds, the heaviest, and
    the last of those; of an encoder-decoder, the decoder's. Raises UnknownArchitecture for a model without one,
    InputError where its config counts none."""
    best, weight = None, -1
    path = encoder_path(model)
    apart = set() if path is None else set(model.get_submodule(path).modules())
    for found in _outer_lists(_text_part(model)):
        if found in apart:
            continue
        held = sum(parameter.numel() for parameter in found.parameters())
        if held >= weight:
            best, weight = found, held
    if best is None:
        text = text_config(model) if hasattr(model, "config") else None
        for name in SIZES["layers"]:
            if getattr(text, name, None) == 0:
                raise InputError(f"config.json: {name}", found="0", expected="one layer or more")
        raise UnknownArchitecture(f"{type(model).__name__} has no list of layers")
    return best


def _text_part(model: nn.Module) -> nn.Module:
    """The smallest part of the model that holds both its input embedding and a list."""
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return model
    path = next((name for name, module in model.named_modules() if module is embedding), "")
    while path:
        path = path.rpartition(".")[0]
        part = model.get_submodule(path)
        if next(_outer_lists(part), None) is not None:
            return part
    return model


def _outer_lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            if len(child):
                yield child
        else:
            yield from _outer_lists(child)


def layer_signatures(model: nn.Module, layers: nn.ModuleList | None = None) -> list[Signature]:
    """What distinguishes the layers: every parameter's path and shape and every scalar attribute, layer by layer, and
    what lists of the config with one entry a layer say: the model may act on them without telling the layer.

    Attributes that only count the layers (a number that grows by the same step from layer to layer) are left out.
    layers: another list than the language model's.
    """
    signatures = _entries(model, layer_list(model) if layers is None else layers)
    counting = _counting(signatures)
    return [tuple((name, value) for name, value in s.items() if name not in counting) for s in signatures]


def _entries(model: nn.Module, layers: nn.ModuleList) -> list[dict[str, Any]]:
    signatures: list[dict[str, Any]] = []
    before: set[int] = set()
    for layer in layers:
        entries: dict[str, Any] = {f"shape of {name}": tuple(p.shape) for name, p in layer.named_parameters()}
        own = set(map(id, layer.parameters()))
        entries["shares parameters with a layer before it"] = bool(own & before)
        before |= own
        for path, module in layer.named_modules():
            entries[f"{path}.class"] = type(module).__name__
            for name, value in sorted(vars(module).items()):
                scalar = isinstance(value, (bool, int, float, str, type(None)))
                if scalar and not name.startswith("_") and name != "training":
                    entries[f"{path}.{name}"] = value
        signatures.append(entries)
    lists = text_config(model).to_dict() if hasattr(model, "config") else {}
    for name, value in lists.items():
        if isinstance(value, list) and len(value) == len(signatures):
            for entries, entry in zip(signatures, value, strict=True):
                if isinstance(entry, (bool, int, float, str, type(None))):
                    entries[f"config {name}"] = entry
    return signatures


def _counting(signatures: Sequence[Mapping[str, Any]]) -> set[str]:
    """Names of attributes that number the layers: the index of the layer in all that have it, two or more, or linear in
    it over three or more."""
    found = set()
    for name in {name for signature in signatures for name in signature}:
        points = [(index, s[name]) for index, s in enumerate(signatures) if name in s]
        if not all(type(value) in (int, float) for _, value in points):
            continue
        if (len(points) == len(signatures) or len(points) > 1) and all(index == value for index, value in points):
            found.add(name)
        elif len(points) > 2:
            (i, a), (j, b) = points[0], points[-1]
            step = (b - a) / (j - i)
            if step and all(
                abs(a + step * (index - i) - value) <= 1e-9 * max(abs(a), abs(b)) for index, value in points
            ):
                found.add(name)
    return found


def kind_of(signature: Signature) -> Signature:
    """The signature without sizes: which parameters of which rank, which classes and flags, and of a number only
    whether it is zero. What remains different is a difference of kind; the rest is read off each layer."""
    entries = {}
    for name, value in signature:
        name = re.sub(r"(?<=[._])\d+(?=[._]|$)", "#", name)
        if name.startswith("shape of "):
            entries[name] = len(value)
        else:
            entries[name] = bool(value) if type(value) in (int, float) else value
    return tuple(sorted(entries.items(), key=lambda entry: entry[0]))


def part_signature(layer: Signature, path: str) -> Signature:
    """What of a layer's signature is about the child at `path`, wherever that is: names are relative to it."""
    inside = re.compile(rf"^(shape of )?{re.escape(path)}\.")
    return tuple((inside.sub(r"\1", name), value) for name, value in layer if inside.match(name))


def layers_to_cover(signatures: Sequence[Signature]) -> int:
    """Length of the shortest prefix of the layers that has one of every kind; at least 2 where the model has them."""
    return min(max(max(_firsts(signatures)) + 1, 2), len(signatures))


def _firsts(signatures: Sequence[Signature], several: Mapping[Signature, int] = MappingProxyType({})) -> list[int]:
    """The first layer of each signature. several: how many of it, for those of which it is more."""
    seen: Counter[Signature] = Counter()
    firsts = []
    for index, signature in enumerate(signatures):
        if seen[signature] < several.get(signature, 1):
            firsts.append(index)
        seen[signature] += 1
    return firsts


def followed(signatures: Sequence[Signature], kept: Sequence[int]) -> list[int]:
    """For every real layer, the place in `kept` of the layer that stands for it: itself, else the first of the same
    signature, else the first of the same kind. Raises UnknownArchitecture for a layer that nothing stands for."""
    kinds = [kind_of(signature) for signature in signatures]
    result = []
    for index in range(len(signatures)):
        same = [p for p, layer in enumerate(kept) if layer == index]
        same += [p for p, layer in enumerate(kept) if signatures[layer] == signatures[index]]
        same += [p for p, layer in enumerate(kept) if kinds[layer] == kinds[index]]
        if not same:
            raise UnknownArchitecture(f"layer {index} is of a kind that none of the layers {list(kept)} has")
        result.append(same[0])
    return result


def alike(signatures: Sequence[Signature], shrunk: Sequence[Signature]) -> list[int]:
    """For every layer with these signatures, the shrunk layer of the same kind: that at its own place, or the first.
    Raises ValueError for a layer that none is like."""
    kinds = [kind_of(signature) for signature in shrunk]
    found = []
    for index, signature in enumerate(signatures):
        kind = kind_of(signature)
        same = [place for place, other in enumerate(kinds) if other == kind]
        if not same:
            raise ValueError(f"layer {index} of the encoder is of a kind that no small layer has")
        found.append(index if index in same else same[0])
    return found


@dataclass(frozen=True)
class Cut:
    """A config with fewer layers, sizes as they are. kept: the real layer that each of its layers is. model: on the
    meta device. numbered: paths of the fields that hold layer numbers or counts."""

    config: dict[str, Any]
    kept: list[int]
    model: nn.Module
    numbered: frozenset[tuple[str, ...]]


def encoder_signatures(model: nn.Module) -> list[Signature]:
    """The same of the encoder that the decoder looks at; [] without one."""
    path = encoder_path(model)
    lists = [] if path is None else list(_outer_lists(model.get_submodule(path)))
    heavy = max(lists, key=lambda held: sum(p.numel() for p in held.parameters()), default=None)
    return [] if heavy is None else layer_signatures(model, heavy)


def cut_layers(
    config: Mapping[str, Any],
    text: tuple[str, ...],
    signatures: Sequence[Signature],
    encoder: Sequence[Signature] = (),
    several: Mapping[Signature, int] = MappingProxyType({}),
) -> Cut:
    """The config with the layers that a small model needs. text: where in the config the language model's part is.
    encoder: signatures of the layers of an encoder beside it, of which every kind is needed too. several: how many
    layers of a kind are needed, for those of which one is not enough.

    Raises UnknownArchitecture where no way of cutting gives the layers that were wanted.
    """
    total = len(signatures)
    kinds = [kind_of(signature) for signature in signatures]
    for kept in _choices(signatures, kinds, several):
        for made in _cuts(config, text, total, kept):
            cut = _tried(made, signatures, kept, kinds)
            if cut is not None and {kind_of(s) for s in encoder} <= {kind_of(s) for s in encoder_signatures(cut.model)}:
                return cut
    raise UnknownArchitecture(f"no field of the config is known to hold the number of layers, {total}")


def _choices(
    signatures: Sequence[Signature], kinds: Sequence[Signature], several: Mapping[Signature, int]
) -> Iterator[list[int]]:
    """Sets of layers to keep, best first."""
    total, more = len(signatures), {index for index in _firsts(kinds, several) if index not in _firsts(kinds)}
    choices = [sorted({*_firsts(keys), *more}) for keys in (signatures, kinds)]
    fine, coarse = (min(max(firsts[-1] + 1, 2), total) for firsts in choices)
    if fine <= PREFIX:
        yield list(range(fine))
    for firsts in choices:
        if len(firsts) <= PREFIX + len(more):
            yield firsts if len(firsts) > 1 else list(range(min(2, total)))
    for length in (fine, coarse):
        if length <= MOST_LAYERS:
            yield list(range(length))
    for length in (coarse, fine, total):
        yield list(range(length))


def _tried(
    made: tuple[dict[str, Any], frozenset], signatures: Sequence[Signature], kept: list[int], kinds: Sequence[Signature]
) -> Cut | None:
    config, numbered = made
    try:
        model, _ = build(config, device="meta")
        got = [kind_of(signature) for signature in layer_signatures(model)]
    except (InputError, UnknownArchitecture):
        return None
    # A number that counts layers among many may not be seen to count them among few: only what is wanted is asked for.
    if len(got) != len(kept) or any(
        dict(kinds[layer]).items() - dict(found).items() for layer, found in zip(kept, got, strict=True)
    ):
        return None
    return Cut(config, kept, model, numbered)


def _cuts(
    config: Mapping[str, Any], text: tuple[str, ...], total: int, kept: list[int]
) -> Iterator[tuple[dict[str, Any], frozenset]]:
    """Configs that may have just the layers `kept`, likeliest first."""
    part = config
    for name in text:
        part = part[name]
    named = {name for name, value in part.items() if name in _COUNTS and value == total}
    equal = {name for name, value in part.items() if type(value) is int and value == total}
    bounds = [name for name, value in part.items() if type(value) is int and 1 < value <= total and name not in named]
    others = sorted(equal - named)
    for counts in (named, *(named | {name} for name in others), *({name} for name in others)):
        for base in (0, 1):
            made, numbered = _cut(part, counts, total, kept, base)
            yield _placed(config, text, made), frozenset((*text, name) for name in numbered)
            if kept != list(range(len(kept))):
                # A number that says from which layer on something holds counts the kept layers before it.
                for name in bounds:
                    below = sum(layer < part[name] for layer in kept)
                    if below != part[name] and name not in numbered:
                        changed = {**made, name: below}
                        yield _placed(config, text, changed), frozenset((*text, n) for n in {*numbered, name})
    # Of how many layers something holds may be said for all of them: every so many has it.
    share = {name: max(1, part[name] * len(kept) // total) for name in bounds if "layers" in name}
    if share and named:
        made, numbered = _cut(part, named, total, kept, 0)
        yield _placed(config, text, {**made, **share}), frozenset((*text, name) for name in {*numbered, *share})


def _cut(
    part: Mapping[str, Any], counts: set[str], total: int, kept: list[int], base: int
) -> tuple[dict[str, Any], set[str]]:
    made: dict[str, Any] = {}
    numbered = set(counts)
    place = {layer: index for index, layer in enumerate(kept)}
    for name, value in part.items():
        if name in counts:
            made[name] = len(kept)
        elif isinstance(value, list) and len(value) == total and not str(name).endswith("token_id"):
            made[name] = _renumbered([value[layer] for layer in kept], place, total)
        elif isinstance(value, Mapping) and value and all(str(key).isdigit() for key in value):
            made[name] = {str(place[int(key)]): held for key, held in value.items() if int(key) in place}
        elif _numbers_layers(name, value, total + base):
            made[name] = [place[number - base] + base for number in value if number - base in place]
            numbered.add(name)
        elif isinstance(value, Mapping):
            made[name], inner = _cut(value, set(), total, kept, base)
            numbered |= {f"{name}.{n}" for n in inner}
        else:
            made[name] = value
    return made, numbered


def _renumbered(values: list[Any], place: Mapping[int, int], total: int) -> list[Any]:
    """A list that says for every layer which earlier one it takes something from, with the new numbers."""
    if all(type(value) is int for value in values) and len(place) > 2:
        layers = list(place)
        points_back = all(value <= layer for value, layer in zip(values, layers, strict=True))
        if points_back and any(value == layer > 1 for value, layer in zip(values, layers, strict=True)):
            return [place.get(value, place[layer]) for value, layer in zip(values, layers, strict=True)]
    return values


def _numbers_layers(name: str, value: Any, total: int) -> bool:
    """Whether a list can be one of layer numbers: rising, each at most once, none too large."""
    if not isinstance(value, list) or not value or str(name).endswith("token_id"):
        return False
    if not all(type(item) is int and 0 <= item < total for item in value):
        return False
    return all(one < other for one, other in pairwise(value))


def _placed(config: Mapping[str, Any], path: tuple[str, ...], part: dict[str, Any]) -> dict[str, Any]:
    """The config with its part at `path` replaced."""
    if not path:
        return dict(part)
    return {**config, path[0]: _placed(config[path[0]], path[1:], part)}
