"""Bytes that a block keeps for its backward pass, by the kind of block.

T tokens, c bytes an element. An input is kept only where a weight that multiplies it is trained: a frozen projection
needs its weight alone. Attention is taken to be fused: it keeps queries, keys, values, its result and one float32 a
head. Routed copies are taken to be spread evenly, times UNEVEN on the ranks of an exchange.
"""

from torch import nn

from dayzero.runtime.lora import LoRALinear
from dayzero.runtime.nn import Experts, GatedFeedForward, GroupedQueryAttention, MixtureOfExperts, RMSNorm

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
    copies = compute * tokens * moe.router.top_k * moe.router.weight.shape[1]
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
    in two orders, gate and up, the result that combine weights, and the experts' inputs where they are trained."""
    router, experts = block.router, block.experts
    hidden, width = router.weight.shape[1], experts.width
    trained = any(parameter.requires_grad for parameter in experts.parameters())
    a_token = 4 * router.experts + (4 * hidden if router.weight.requires_grad else 0) + router.top_k * (8 + 8 + 2 * 8)
    inside = compute * (2 * width + (hidden + width if trained else 0))
    a_copy = inside * (UNEVEN if ep > 1 else 1.0) + compute * hidden
    return int(tokens * (a_token + router.top_k * a_copy))


def _any(block: nn.Module) -> int:
    """Elements a token of a block without a formula of its own: inputs and outputs of all its projections."""
    linears = [module for module in block.modules() if isinstance(module, nn.Linear)]
    stacked = [module for module in block.modules() if isinstance(module, Experts)]
    return sum(m.in_features + m.out_features for m in linears) + sum(3 * m.width for m in stacked)


def _input(linear: nn.Linear) -> int:
    return linear.in_features if any(parameter.requires_grad for parameter in linear.parameters()) else 0


def _rank(linear: nn.Linear) -> int:
    return linear.rank if isinstance(linear, LoRALinear) else 0
