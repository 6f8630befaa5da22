"""Bytes that a block keeps for its backward pass, by the kind of block.

T tokens, c bytes an element. An input is kept only where a weight that multiplies it is trained: a frozen projection
needs its weight alone. Attention is taken to be fused: it keeps queries, keys, values, its result and one float32 a
head. Routed copies are taken to be spread evenly, times UNEVEN on the ranks of an exchange.
"""

from torch import nn

from dayzero.runtime.lora import LoRALinear
from dayzero.runtime.nn import Experts, FeedForward, GatedFeedForward, GroupedQueryAttention, MixtureOfExperts, RMSNorm

UNEVEN = 1.5  # what a busy expert-parallel rank receives, as a multiple of its share


def kept_bytes(layer: nn.Module, compute: int, tokens: int, ep: int) -> int:
    """Of a decoder layer: the inputs of its norms, and what its blocks keep."""
    return sum(_norm_or_block(child, compute, tokens, ep) for child in layer.children())


def largest_block(layer: nn.Module, compute: int, tokens: int, ep: int) -> int:
    """Of the block of the layer that keeps most."""
    return max(_norm_or_block(child, compute, tokens, ep) for child in layer.children())


def routed_bytes(moe: MixtureOfExperts | None, compute: int, tokens: int, ep: int) -> int:
    """c T K H for the token copies; with an exchange also as received and as sorted, UNEVEN times."""
    if moe is None:
        return 0
    copies = compute * tokens * moe.router.top_k * moe.experts.hidden
    return copies if ep == 1 else copies + int(2 * UNEVEN * copies)


def _norm_or_block(block: nn.Module, compute: int, tokens: int, ep: int) -> int:
    match block:
        case RMSNorm():
            return compute * tokens * block.width
        case GroupedQueryAttention():
            return tokens * (compute * _attention(block) + 4 * block.heads)
        case GatedFeedForward():
            inputs = max(_input(block.gate), _input(block.up))
            width = block.gate.out_features
            ranks = sum(map(_rank, (block.gate, block.up, block.down)))
            return compute * tokens * (inputs + 2 * width + _input(block.down) + ranks)
        case FeedForward():
            ranks = sum(map(_rank, (block.up, block.down)))
            return compute * tokens * (_input(block.up) + block.up.out_features + _input(block.down) + ranks)
        case MixtureOfExperts():
            return _moe(block, compute, tokens, ep)
    return compute * tokens * _any(block)


def _attention(block: GroupedQueryAttention) -> int:
    """Elements a token: input, queries, keys and values (also before a norm), result."""
    projections = (block.query, block.key, block.value)
    queries, keys = block.heads * block.head_dim, block.kv_heads * block.head_dim
    normed = queries + keys if block.qk_norm != "none" else 0
    ranks = sum(_rank(linear) for linear in (*projections, block.output))
    return max(map(_input, projections)) + 2 * queries + 2 * keys + normed + ranks


def _moe(block: MixtureOfExperts, compute: int, tokens: int, ep: int) -> int:
    """A token: the router's float32 scores and input (where trained), index and weight of each copy. A copy: its place
    in two orders, gate and up, the result that combine weights, and the experts' inputs where they are trained.
    Shared experts and latent projections come on top."""
    router, experts = block.router, block.experts
    hidden, width = experts.hidden, experts.width
    trained = any(parameter.requires_grad for parameter in experts.parameters())
    stream = block.into.in_features if block.into is not None else hidden
    routing = 4 * stream if any(parameter.requires_grad for parameter in router.parameters()) else 0
    a_token = 4 * router.experts + routing + router.top_k * (8 + 8 + 2 * 8)
    inside = compute * ((1 + experts.is_gated) * width + (hidden + width if trained else 0))
    a_copy = inside * (UNEVEN if ep > 1 else 1.0) + compute * hidden
    around = sum(_input(linear) + _rank(linear) for linear in (block.into, block.out_of) if linear is not None)
    shared = 0 if block.shared is None else _norm_or_block(block.shared, compute, tokens, ep)
    return int(tokens * (a_token + router.top_k * a_copy + compute * around)) + shared


def _any(block: nn.Module) -> int:
    """Elements a token of a block without a formula of its own: inputs and outputs of all its projections."""
    linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
    stacked = [module for module in block.modules() if isinstance(module, Experts)]
    return sum(m.in_features + m.out_features for m in linears) + sum(3 * m.width for m in stacked)


def _input(linear: nn.Linear) -> int:
    return linear.in_features if any(parameter.requires_grad for parameter in linear.parameters()) else 0


def _rank(linear: nn.Linear) -> int:
    return linear.rank if isinstance(linear, LoRALinear) else 0
