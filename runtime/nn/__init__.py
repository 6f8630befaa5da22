"""Blocks that generated models are made of. One concept a file; each proven against its reference by onboarding.

Dimension letters: T tokens (all documents of a batch packed end to end), H hidden, N heads, G key/value heads,
D head size, E experts, K experts per token, F feed-forward width, V vocabulary.
"""

from .attention import GroupedQueryAttention
from .causal_lm import CausalLM
from .context import Context
from .decoder_layer import DecoderLayer
from .experts import Experts
from .feed_forward import GatedFeedForward
from .gated_delta_net import GatedDeltaNet
from .moe import MixtureOfExperts
from .norm import RMSNorm
from .rotary import Rotary
from .router import Router

BLOCKS = {
    block.__name__: block
    for block in (
        CausalLM,
        DecoderLayer,
        Experts,
        GatedDeltaNet,
        GatedFeedForward,
        GroupedQueryAttention,
        MixtureOfExperts,
        RMSNorm,
        Rotary,
        Router,
    )
}

__all__ = [
    "BLOCKS",
    "CausalLM",
    "Context",
    "DecoderLayer",
    "Experts",
    "GatedDeltaNet",
    "GatedFeedForward",
    "GroupedQueryAttention",
    "MixtureOfExperts",
    "RMSNorm",
    "Rotary",
    "Router",
]
