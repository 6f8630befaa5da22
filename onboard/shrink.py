"""A tiny model of the same kind: few layers that still cover every kind, small sizes that no two of agree.

A wrong transposition or swap must not fit by accident, so every size that could meet another in a shape is different
from it, and none of the matrices is square where the architecture allows it.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from dayzero.onboard.config_fields import field_of, size_of
from dayzero.onboard.reference import UnknownArchitecture, build, load_config
from dayzero.runtime.errors import InputError

SEQUENCE = 24  # tokens of a proof's documents: more than the window, many more than top_k
MOST_LAYERS = 12

# heads * head_dim = 84, kv_heads * head_dim = 42; 2 * width and 2 * expert_width stay apart from all of them too.
# hidden is a multiple of heads, which some configs insist on; it is the query width where they have no head size.
_SMALL = {
    "hidden": 48,
    "heads": 6,
    "kv_heads": 3,
    "head_dim": 14,
    "vocabulary": 131,
    "width": 58,
    "expert_width": 34,
    "shared_width": 22,
    "experts": 10,
    "top_k": 3,
    "window": 7,
}

Signature = tuple[tuple[str, Any], ...]


def layer_signatures(model: nn.Module) -> list[Signature]:
    """What distinguishes the layers: every parameter's path and shape and every scalar attribute, layer by layer.

    Attributes that are simply the layer's own number, in every layer, are left out.
    """
    signatures: list[dict[str, Any]] = []
    for layer in _layers(model):
        entries: dict[str, Any] = {f"shape of {name}": tuple(p.shape) for name, p in layer.named_parameters()}
        for path, module in layer.named_modules():
            for name, value in sorted(vars(module).items()):
                scalar = isinstance(value, (bool, int, float, str, type(None)))
                if scalar and not name.startswith("_") and name != "training":
                    entries[f"{path}.{name}"] = value
        signatures.append(entries)
    numbering = {
        name
        for name in signatures[0]
        if all(type(s.get(name)) is int and s[name] == index for index, s in enumerate(signatures))
    }
    return [tuple((name, value) for name, value in s.items() if name not in numbering) for s in signatures]


def _layers(model: nn.Module) -> nn.ModuleList:
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise UnknownArchitecture(f"{type(model).__name__} has no list of layers")
    return max(lists, key=len)


def part_signature(layer: Signature, path: str) -> Signature:
    """What of a layer's signature is about the child at `path`."""
    return tuple(entry for entry in layer if entry[0].removeprefix("shape of ").startswith(path + "."))


def layers_to_cover(signatures: list[Signature]) -> int:
    """Length of the shortest prefix of the layers that has one of every kind; at least 2 where the model has them."""
    kinds = set(signatures)
    seen: set[Signature] = set()
    for index, signature in enumerate(signatures):
        seen.add(signature)
        if seen == kinds:
            return min(max(index + 1, 2), len(signatures))
    return len(signatures)


def shrink(config: Mapping[str, Any]) -> dict[str, Any]:
    """The small config. Builds the real model on the meta device to see its layers' kinds.

    Raises UnknownArchitecture for a model without a list of layers, InputError for a config that makes none.

    Lists with one entry a layer are cut to the layers kept; lists of layer numbers keep the numbers that are left.
    """
    config = complete(config)
    model, _ = build(config, device="meta")
    total = len(_layers(model))
    layers = field_of(config, "layers")
    if layers is None:
        raise UnknownArchitecture(f"no field of the config is known to hold the number of layers, {total}")
    if not total:
        raise InputError(f"config.json: {layers}", found=str(config[layers]), expected="at least one layer")
    kept = min(layers_to_cover(layer_signatures(model)), MOST_LAYERS)
    small = {name: _cut(value, total, kept) for name, value in config.items()}
    for meaning, value in _SMALL.items():
        if size_of(config, meaning) is not None:
            small[str(field_of(config, meaning))] = value
    small[layers] = kept
    for name, value in config.items():
        if name.endswith("token_id") and isinstance(value, int):
            small[name] = min(value, 2)
        elif name.endswith("token_id") and isinstance(value, list):
            small[name] = [1]
    small.pop("quantization_config", None)
    return small


def complete(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with the defaults that its class fills in for fields the file leaves out."""
    loaded = load_config(config).to_dict()
    loaded.pop("_name_or_path", None)  # a folder that is gone again
    return {**loaded, "architectures": list(config.get("architectures") or [])}


def _cut(value: Any, total: int, kept: int) -> Any:
    if not isinstance(value, list) or not value:
        return value
    if len(value) == total:
        return value[:kept]
    if all(isinstance(item, int) and not isinstance(item, bool) and 0 <= item < total for item in value):
        return [item for item in value if item < kept]
    return value
