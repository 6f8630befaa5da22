"""Activation recompute: keep only a layer's input, and run the layer again in the backward pass (Chen et al. 2016,
arXiv:1604.06174), with the routing as it was."""

import threading
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

_replaying = threading.local()
ROUTING = frozenset({torch.ops.aten.topk.default})


def recompute(layer: nn.Module) -> None:
    """Makes the layer's forward pass forget everything but its input and its choice of experts.

    Chosen again, experts of a near tie could differ, and the gradient would belong to another function. Wrap the layer
    before it is sharded: its parameters are then gathered around both passes.
    """
    layer.forward = partial(_recomputed, layer.forward)


def computed_again() -> bool:
    """Whether what runs now is a layer's second computation, in the backward pass: what counts has been counted."""
    return getattr(_replaying, "layers", 0) > 0


def _recomputed(forward, *args):
    return checkpoint(forward, *args, use_reentrant=False, context_fn=_contexts)


def _contexts() -> tuple["_Keep", "_Replay"]:
    kept: list[tuple[Tensor, ...]] = []
    return _Keep(kept), _Replay(kept)


class _Keep(TorchDispatchMode):
    """Stores the results of the ROUTING operations in order.

    Not torch's selective checkpointing: it also counts the profiler ranges that nested FSDP modules open, and those
    differ between the two passes.
    """

    def __init__(self, kept: list[tuple[Tensor, ...]]):
        super().__init__()
        self.kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func in ROUTING:
            self.kept.append(tuple(part.detach() for part in out))
        return out


class _Replay(TorchDispatchMode):
    """Answers the ROUTING operations with what was stored."""

    def __init__(self, kept: list[tuple[Tensor, ...]]):
        super().__init__()
        self.kept, self.next = kept, 0

    def __enter__(self):
        self.next = 0
        _replaying.layers = getattr(_replaying, "layers", 0) + 1
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        _replaying.layers -= 1
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in ROUTING:
            return func(*args, **(kwargs or {}))
        self.next += 1
        return tuple(part.detach() for part in self.kept[self.next - 1])
