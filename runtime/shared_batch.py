"""What the ranks that share a batch, over tp and cp, need and move beside what data parallelism does.

T: tokens of the batch; a rank computes attention for T / cp of them, and has T / (cp tp) between blocks. Uneven parts
are counted as the largest. c: bytes of an element of the pass.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import nn

from dayzero.runtime.nn import CausalLM, DecoderLayer, GroupedQueryAttention, LatentAttention, MixtureOfAttention
from dayzero.runtime.tensor_parallel import check_alone, cuts_of, inner_parts, parts_of


@dataclass(frozen=True)
class Sharing:
    """Of a kind of layer. width: channels of what is gathered over tp: inputs of blocks that run on the rows of all tp
    ranks, or the keys and values of what sees across ranks. keys: channels of keys and values, or latents, that are
    gathered over cp."""

    width: int
    keys: int


def cut_dimensions(model: CausalLM, tp: int) -> dict[int, int]:
    """id of a parameter -> the dimension that tp cuts. Raises InputError for sizes that do not fit."""
    if tp == 1:
        return {}
    check_alone(model, tp, 1)
    found = {}
    for path, part in parts_of(model):
        found |= {id(cut.tensor): cut.dim for cut in cuts_of(part, tp, path) if not cut.copies}
    if model.embed.num_embeddings % tp == 0:
        held = (model.embed.weight, model.head.weight if model.head is not None else None, model.head_bias)
        found |= {id(parameter): 0 for parameter in held if parameter is not None}
    return found


def sharing_of(layer: nn.Module, tp: int) -> Sharing:
    """Of one layer of the model."""
    width = keys = 0
    for path, part in _parts(layer):
        if isinstance(part, MixtureOfAttention):
            both = part.key.out_features + part.value.out_features
            width, keys = width + both, keys + tp * both  # gathered over all ranks, with all heads
        elif (tp > 1 and cuts_of(part, tp, path)) or getattr(part, "uses_context", False):
            linear = next((module for module in part.modules() if isinstance(module, nn.Linear)), None)
            width += linear.in_features if linear is not None else 0
        for module in part.modules():
            if isinstance(module, GroupedQueryAttention):
                keys += module.kv_heads * (module.head_dim + module.value_dim)
            elif isinstance(module, LatentAttention):
                keys += module.kv_rank + module.rope_dim
    return Sharing(width, keys)


def kept_bytes(sharing: Sharing, compute: int, tokens: int, tp: int, cp: int) -> int:
    """c (T / cp - T / (cp tp)) for each channel of gathered inputs, and c (T - T / cp) of gathered keys and values."""
    part = -(-tokens // cp)
    return compute * ((part - -(-part // tp)) * sharing.width + (tokens - part) * -(-sharing.keys // tp))


def moved_bytes(sharing: Sharing, compute: int, tokens: int, tp: int, cp: int, recompute: bool) -> tuple[int, int]:
    """(over tp, over cp), of all collectives of a step. Rows are gathered and summed around each block, forward and
    backward and again with recompute; keys and values are gathered, and their gradients summed."""
    part, passes = -(-tokens // cp), 3 if recompute else 2
    rows = 2 * passes * compute * part * sharing.width if tp > 1 else 0
    return rows, passes * compute * tokens * -(-sharing.keys // tp) if cp > 1 else 0


def _parts(layer: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for name, part in layer.all_parts() if isinstance(layer, DecoderLayer) else layer.named_children():
        yield from inner_parts(f"layer.{name}", part)
