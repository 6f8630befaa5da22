"""Claims about sizes that tensors have: where they state another number, the shapes have proven them wrong."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from dayzero.onboard.claims.shown import Layer, Shown, Verdict, all_are, argument
from dayzero.runtime.block_spec import BlockSpec

Meaning = Callable[[Any, Shown], Verdict | None]


def _size(what: str, sizes: Callable[[Shown], Iterable[Any]]) -> Meaning:
    """The claim that every one of these sizes is the value. A set in place of a size: any of them may be meant."""

    def check(value: Any, shown: Shown) -> Verdict | None:
        if value is not None and type(value) is not int:
            return None
        found = [value if isinstance(size, set) and value in size else size for size in sizes(shown)]
        plain = [", ".join(map(str, sorted(size))) if isinstance(size, set) else size for size in found]
        return all_are(value, plain, what, shown.hides_mixers, by="tensors")

    return check


def _usual(what: str, sizes: Callable[[Iterable[BlockSpec]], Iterable[Any]]) -> Meaning:
    """The same of attention; where its layers differ, some have fields of their own, and this is one of the others."""

    def any_of(shown: Shown) -> Iterator[Any]:
        found = list(sizes(_attention(shown)))
        single = {size for held in found for size in (held if isinstance(held, set) else {held})}
        yield from found if len(single) == 1 or not found else [single]

    return _size(what, any_of)


def _attention(shown: Shown, where: Callable[[Layer], bool] = lambda layer: True) -> list[BlockSpec]:
    return shown.blocks(lambda layer: layer.attentions, where)


def _heads(blocks: Iterable[BlockSpec]) -> Iterator[int]:
    yield from (argument(block, "heads") for block in blocks)


def _kv_heads(blocks: Iterable[BlockSpec]) -> Iterator[int]:
    """Heads of keys; a latent is unfolded for every head, and compressed attention has one."""
    for block in blocks:
        one = {"LatentAttention": argument(block, "heads"), "CompressedAttention": 1}
        yield one[block.block] if block.block in one else argument(block, "kv_heads")


def _head_dim(blocks: Iterable[BlockSpec]) -> Iterator[Any]:
    for block in blocks:
        if block.block == "LatentAttention":
            nope, rope, value = (argument(block, name) for name in ("nope_dim", "rope_dim", "value_dim"))
            yield {nope, rope, nope + rope, value}
        else:
            yield argument(block, "head_dim")


def _value_dim(blocks: Iterable[BlockSpec]) -> Iterator[int]:
    for block in blocks:
        yield argument(block, "value_dim") or argument(block, "head_dim")


def _of(name: str, *classes: str) -> Callable[[Shown], Iterable[Any]]:
    """An argument of blocks of these classes."""
    return lambda shown: [argument(block, name) for block in shown.blocks(lambda layer: layer.of(classes))]


def _windowed(layer: Layer) -> bool:
    return layer.window is not None


def _unwindowed(layer: Layer) -> bool:
    return layer.window is None


def _query_key_dim(shown: Shown) -> Iterator[int]:
    for block in shown.blocks(lambda layer: layer.of({"LatentAttention"})):
        yield argument(block, "nope_dim") + argument(block, "rope_dim")


def _index(name: str) -> Callable[[Shown], Iterable[Any]]:
    return lambda shown: [
        argument(block, name) or argument(argument(block, "compressor"), name)
        for block in shown.blocks(lambda layer: layer.indexers)
    ]


layer_count = _size("layers", lambda shown: [shown.count])
dense_width = _size(
    "width of a feed-forward layer",
    lambda shown: [argument(block, "width") for block in shown.blocks(lambda layer: layer.dense_layers)],
)
heads = _usual("heads", _heads)
kv_heads = _usual("heads of keys", _kv_heads)
head_dim = _usual("size of a head", _head_dim)
value_dim = _usual("size of a value head", _value_dim)
window_heads = _size("heads where there is a window", lambda shown: _heads(_attention(shown, _windowed)))
window_kv_heads = _size("heads of keys where there is a window", lambda s: _kv_heads(_attention(s, _windowed)))
window_head_dim = _size("size of a head where there is a window", lambda s: _head_dim(_attention(s, _windowed)))
window_value_dim = _size("size of a value where there is a window", lambda s: _value_dim(_attention(s, _windowed)))
global_kv_heads = _size("heads of keys where there is no window", lambda s: _kv_heads(_attention(s, _unwindowed)))
global_head_dim = _size("size of a head where there is no window", lambda s: _head_dim(_attention(s, _unwindowed)))
query_key_dim = _size("channels of a query", _query_key_dim)
nope_dim = _size("channels that do not turn", _of("nope_dim", "LatentAttention"))
query_rank = _size("rank of queries", _of("query_rank", "LatentAttention", "CompressedAttention"))
kv_rank = _size("rank of keys and values", _of("kv_rank", "LatentAttention"))
index_heads = _size("heads of indexers", _index("heads"))
index_dim = _size("size of an indexer's head", _index("head_dim"))
linear_heads = _size("heads of the recurrence", _of("heads", "GatedDeltaNet"))
linear_key_heads = _size("key heads of the recurrence", _of("key_heads", "GatedDeltaNet"))
linear_key_dim = _size("size of a recurrence's key", _of("key_dim", "GatedDeltaNet"))
linear_value_dim = _size("size of a recurrence's value", _of("value_dim", "GatedDeltaNet"))
convolution = _size(
    "tokens of a convolution", _of("conv_width", "GatedDeltaNet", "Mamba", "Mamba2", "GatedShortConvolution")
)
