"""A pass over a model without values, to see what it would allocate and which operators it would call.

On the meta device tensors have shapes and storages and no memory. Every storage that a pass makes is followed until it
is freed, so that what is alive after the forward pass is what the backward pass needs, whatever kept it: autograd, a
checkpointed function, or what a layer left for later ones. Where a result's shape depends on values, the shape that it
has for evenly spread values is taken.

Operators of the registry and fused attention stand in for themselves: they keep what their fused kernels keep, and
compute nothing. The same on a device with memory counts the same bytes.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dayzero.kernels.registry import Operator, standing_in
from dayzero.runtime.nn import CausalLM, Context, Experts, Routed

aten = torch.ops.aten
See = Callable[..., None]


@dataclass(frozen=True)
class LayerBytes:
    """Of one layer, beside its parameters and its input.

    kept: alive after the forward pass, its output included. by_experts: of these, what routed experts keep inside.
    output: its output, and what it leaves for later layers. routing: results of selections (top-k).
    working: what is allocated on top of `kept` at the worst moment of either pass, gradients of parameters left out.
    """

    kept: int
    by_experts: int
    output: int
    routing: int
    working: int


class _Followed(TorchDispatchMode):
    """held: bytes alive of what was made inside; peak: the most of it so far; routing: bytes of top-k results."""

    def __init__(self, known: Sequence[Tensor]):
        super().__init__()
        self.known = {_key(tensor) for tensor in known}
        self.alive: set[int] = set()
        self.held = self.peak = self.routing = 0
        self.copies = 1  # of what was counted last: token copies of a routed layer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = self._answer(func, args, kwargs or {})
        if out is None:
            out = func(*args, **(kwargs or {}))
        made = [leaf for leaf in tree_leaves(out) if isinstance(leaf, Tensor)]
        for tensor in made:
            self._follow(tensor)
        if func is aten.topk.default:
            self.routing += sum(tensor.nbytes for tensor in made)
        return out

    def _answer(self, func: Any, args: Any, kwargs: Any) -> Any:
        """What an operation gives whose shape or value cannot be known, None for any other."""
        if func is aten.bincount.default:
            self.copies = args[0].numel()
        if not (args and isinstance(args[0], Tensor) and args[0].is_meta):
            return None
        first = args[0]
        if func is aten.bincount.default:
            return first.new_empty(args[2] if len(args) > 2 else kwargs["minlength"], dtype=torch.int64)
        if func is aten._local_scalar_dense.default:
            return True if first.dtype == torch.bool else 1.0 if first.is_floating_point() else self.copies
        if func is aten.repeat_interleave.Tensor:
            size = kwargs.get("output_size") or self.copies
            return first.new_empty(size)
        if func is aten.nonzero.default:
            return first.new_empty(first.numel(), first.ndim, dtype=torch.int64)
        return None

    def _follow(self, tensor: Tensor) -> None:
        key = _key(tensor)
        if key in self.known or key in self.alive:
            return
        storage = tensor.untyped_storage()
        size = storage.nbytes()
        self.alive.add(key)
        self.held += size
        self.peak = max(self.peak, self.held)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        if key in self.alive:
            self.alive.remove(key)
            self.held -= size
        else:
            self.known.discard(key)  # overlooked; the next storage may have the same address

    def overlook(self, tensor: Tensor) -> Tensor:
        """Takes the tensor out of the count: a parameter's gradient, which has its own line."""
        key = _key(tensor)
        if key in self.alive:
            self.alive.remove(key)
            self.held -= tensor.untyped_storage().nbytes()
            self.known.add(key)
        return tensor


def _key(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class _Stand(torch.autograd.Function):
    """Keeps what a fused kernel keeps, and gives zeros: as its result, and as gradients.

    keep: places of the inputs that it keeps. rest: what else. of: whether its result is kept as well. The gradient of a
    leaf, which is a parameter, takes no memory: parameters' gradients have their own line.
    """

    @staticmethod
    def forward(
        ctx, keep: tuple[int, ...], rest: tuple[Tensor, ...], of: bool, shape: tuple[int, ...], *inputs: Tensor
    ):
        ctx.likes = [(t.shape, t.dtype, t.device, t.is_leaf) for t in inputs]
        result = inputs[0].new_zeros(shape)
        ctx.save_for_backward(*(inputs[place] for place in keep), *rest, *([result] if of else []))
        return result

    @staticmethod
    def backward(ctx, grad: Tensor):
        grads = []
        for (shape, dtype, device, leaf), needed in zip(ctx.likes, ctx.needs_input_grad[4:], strict=True):
            like = torch.zeros((1,) * len(shape) if leaf else shape, dtype=dtype, device=device)
            grads.append(like.expand(shape) if needed else None)
        return None, None, None, None, *grads


def _kernel(operator: Operator, *args: Any, **kwargs: Any) -> Tensor:
    """An operator without its arithmetic, keeping what its fused kernel keeps."""
    match operator.name:
        case "rms_norm":
            x, weight = args[:2]
            scale = x.new_zeros(x.shape[:-1], dtype=torch.float32)
            return _Stand.apply((0,), (scale,), False, x.shape, x, *(() if weight is None else (weight,)))
        case "swiglu":
            gate, up = args[:2]
            return _Stand.apply((0, 1), (), False, gate.shape, gate, up)
        case "grouped_gemm":
            x, weight, counts = args
            keep = (0,) * weight.requires_grad + (1,) * x.requires_grad
            return _Stand.apply(keep, (counts,), False, (x.shape[0], weight.shape[1]), x, weight)
    return operator.reference(*args, **kwargs)


class _FusedAttention(TorchFunctionMode):
    """Scaled dot-product attention keeps queries, keys, values, its result, and one float32 a query and head."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not F.scaled_dot_product_attention:
            return func(*args, **(kwargs or {}))
        query, key, value = args[:3]
        mask = (kwargs or {}).get("attn_mask", args[3] if len(args) > 3 else None)
        total = query.new_zeros(query.shape[:-1], dtype=torch.float32)
        rest = (total,) if mask is None else (total, mask)
        return _Stand.apply((0, 1, 2), rest, True, (*query.shape[:-1], value.shape[-1]), query, key, value)


@contextmanager
def _without_arithmetic(see: See | None = None) -> Iterator[None]:
    def call(operator: Operator, *args: Any, **kwargs: Any) -> Tensor:
        if see is not None:
            see(operator.name, *args, **kwargs)
        return _kernel(operator, *args, **kwargs)

    with standing_in(call), _FusedAttention():
        yield


def operators_called(model: CausalLM, see: See, tokens: int = 8) -> None:
    """see(name, *args, **kwargs) for every call of an operator in a forward pass of a model on the meta device."""
    device = model.embed.weight.device
    ids, bounds = torch.zeros(tokens, dtype=torch.int64, device=device), torch.tensor([0, tokens])
    with _without_arithmetic(see), _Followed([]):
        model(ids, bounds)
    _forget_counts(model)


def layer_bytes(model: CausalLM, tokens: int) -> list[LayerBytes]:
    """For each layer, the bytes of a forward and backward pass over one document of so many tokens.

    The model is in the dtype of the pass, on any device; on one with memory it really runs, on nonsense.
    """
    inputs: list[tuple[Any, Context]] = []
    hooks = [
        layer.register_forward_pre_hook(lambda layer, args: inputs.append((args[0], _apart(args[1]))))
        for layer in model.all_layers
    ]
    try:
        operators_called(model, lambda *args, **kwargs: None, tokens)
    finally:
        for hook in hooks:
            hook.remove()
    return [_bytes_of(layer, x, context) for layer, (x, context) in zip(model.all_layers, inputs, strict=True)]


def _apart(context: Context) -> Context:
    """The context as it is now, off its graph."""
    source = context.source
    if source is not None:
        source = replace(source, states=source.states.detach())
    return replace(context, shared={name: value.detach() for name, value in context.shared.items()}, source=source)


def _bytes_of(layer: nn.Module, x: Any, context: Context) -> LayerBytes:
    streams = x if isinstance(x, tuple) else (x,)
    streams = tuple(stream.detach().clone().requires_grad_() for stream in streams)
    before = dict(context.shared)
    given = [t for pair in context.tables for t in pair]
    given += [t for t in (context.ids, context.position, context.cu_seqlens) if t is not None]
    given += [context.source.states] if context.source is not None else []
    parameters = list(layer.parameters())
    followed = _Followed([*parameters, *layer.buffers(), *streams, *before.values(), *given])
    inside = _OfExperts(layer, followed)
    hooks = [p.register_hook(followed.overlook) for p in parameters if p.requires_grad]
    try:
        with _without_arithmetic(), followed:
            y = layer(streams if isinstance(x, tuple) else streams[0], context)
            kept, forward = followed.held, followed.peak
            results = [t for t in (y if isinstance(y, tuple) else (y,)) if _key(t) in followed.alive]
            left = [t for name, t in context.shared.items() if before.get(name) is not t]
            output = _distinct([*results, *(t for t in left if _key(t) in followed.alive)])
            routing, followed.peak = followed.routing, followed.held
            wanted = [t for t in (*streams, *parameters) if t.requires_grad]
            torch.autograd.grad(results, wanted, [torch.zeros_like(t) for t in results], allow_unused=True)
    finally:
        for hook in [*hooks, *inside.hooks]:
            hook.remove()
        _forget_counts(layer)
    return LayerBytes(kept, inside.kept, output, routing, max(forward, followed.peak) - kept)


def _forget_counts(module: nn.Module) -> None:
    """No token was in this pass."""
    for mixture in module.modules():
        if isinstance(mixture, Routed):
            mixture.take_counts()


def _distinct(tensors: Sequence[Tensor]) -> int:
    return sum({_key(t): t.untyped_storage().nbytes() for t in tensors}.values())


class _OfExperts:
    """kept: bytes alive behind each container of experts that were not before it."""

    def __init__(self, layer: nn.Module, followed: _Followed):
        self.kept, self.followed, self.before = 0, followed, 0
        self.hooks: list[Any] = []
        for module in layer.modules():
            if isinstance(module, Experts):
                self.hooks += [module.register_forward_pre_hook(self._enter), module.register_forward_hook(self._leave)]

    def _enter(self, module: nn.Module, args: Any) -> None:
        self.before = self.followed.held

    def _leave(self, module: nn.Module, args: Any, out: Any) -> None:
        self.kept += self.followed.held - self.before
