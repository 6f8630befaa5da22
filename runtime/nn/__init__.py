"""Blocks that generated models are made of. One concept a file; each proven against its reference by onboarding.

Dimension letters: T tokens (all documents of a batch packed end to end), H hidden, N heads, G key/value heads,
D head size, E experts, K experts per token, F feed-forward width, V vocabulary.
"""

from .adapted import Adapted
from .affine import Affine, AffineSum
from .attention import GroupedQueryAttention
from .attention_residual import AttentionResidual
from .block_indexer import BlockIndexer
from .carried_router import CarriedRouter
from .causal_lm import CausalLM
from .channel_scale import ChannelScale
from .compressed_attention import CompressedAttention
from .compressor import CompressedIndexer, Compressor
from .context import Context
from .convolution_residual import ConvolutionResidual
from .cross_attention import CrossAttention
from .decoder_layer import DecoderLayer
from .distance_bias import DistanceBiasedAttention
from .dynamic_mask import DynamicMaskAttention
from .encoder import Encoder
from .experts import Experts
from .feed_forward import FeedForward, GatedFeedForward
from .gated_activation import ClampedGLU, OaiSwiGLU, SoftcappedGLU
from .gated_delta_net import GatedDeltaNet
from .gated_residual import GatedConnection
from .handed_routing import HandedRouting, LeaveRouting
from .hash_router import HashRouter
from .hyper_connection import HyperConnected, HyperConnection, StreamMean, StreamMerge
from .indexed_attention import IndexedAttention
from .indexer import LightningIndexer
from .joint_router import JointRouter
from .latent_attention import LatentAttention
from .layer_inputs import GatedLayerInput, LayerInputs
from .layer_norm import LayerNorm
from .lifted import Inside, Lifted
from .lifted_router import LiftedRouter
from .lightning_attention import LightningAttention
from .loop import Loop
from .mamba import Mamba
from .mamba2 import Mamba2
from .message_gate import MessageGate
from .mixture_of_attention import MixtureOfAttention
from .mlstm import MLSTM
from .moe import MixtureOfExperts
from .norm import GatedRMSNorm, RMSNorm, ScaledFirstRMSNorm, SelfGatedRMSNorm
from .pooled_indexer import MeanPooledIndexer, PooledIndexer
from .product_key_router import ProductKeyRouter
from .projection import Projection, SideBySide
from .query_scale import PositionScale
from .relative_attention import RelativeAttention
from .residual_gate import ResidualGate
from .rg_lru import RecurrentBlock
from .rotary import Rotary
from .routed import Routed
from .router import Router, Routing
from .rwkv import ChannelMix, TimeMix
from .selection import GroupLimit, Normalise
from .short_convolution import GatedShortConvolution
from .sinusoidal_positions import SinusoidalPositions
from .sparse_mixer_router import SparseMixerRouter
from .top_one_router import TopOneRouter

BLOCKS = {
    block.__name__: block
    for block in (
        Adapted,
        Affine,
        AffineSum,
        AttentionResidual,
        ResidualGate,
        MessageGate,
        MLSTM,
        TimeMix,
        ChannelMix,
        RecurrentBlock,
        GatedShortConvolution,
        BlockIndexer,
        CarriedRouter,
        CausalLM,
        ChannelScale,
        ClampedGLU,
        CompressedAttention,
        CompressedIndexer,
        Compressor,
        ConvolutionResidual,
        CrossAttention,
        DecoderLayer,
        DistanceBiasedAttention,
        DynamicMaskAttention,
        Encoder,
        Loop,
        Experts,
        FeedForward,
        GatedConnection,
        GatedDeltaNet,
        GatedFeedForward,
        GatedLayerInput,
        GatedRMSNorm,
        GroupLimit,
        GroupedQueryAttention,
        HandedRouting,
        HashRouter,
        HyperConnected,
        HyperConnection,
        Inside,
        IndexedAttention,
        JointRouter,
        LatentAttention,
        LayerInputs,
        LayerNorm,
        LeaveRouting,
        Lifted,
        LiftedRouter,
        LightningIndexer,
        LightningAttention,
        Mamba,
        Mamba2,
        MeanPooledIndexer,
        MixtureOfAttention,
        MixtureOfExperts,
        Normalise,
        OaiSwiGLU,
        PooledIndexer,
        PositionScale,
        ProductKeyRouter,
        Projection,
        RMSNorm,
        RelativeAttention,
        Rotary,
        Router,
        ScaledFirstRMSNorm,
        SelfGatedRMSNorm,
        SideBySide,
        SinusoidalPositions,
        SoftcappedGLU,
        SparseMixerRouter,
        StreamMean,
        StreamMerge,
        TopOneRouter,
    )
}

__all__ = [
    "BLOCKS",
    "MLSTM",
    "Adapted",
    "Affine",
    "AffineSum",
    "AttentionResidual",
    "BlockIndexer",
    "CarriedRouter",
    "CausalLM",
    "ChannelMix",
    "ChannelScale",
    "ClampedGLU",
    "CompressedAttention",
    "CompressedIndexer",
    "Compressor",
    "Context",
    "ConvolutionResidual",
    "DecoderLayer",
    "DynamicMaskAttention",
    "Experts",
    "FeedForward",
    "GatedConnection",
    "GatedDeltaNet",
    "GatedFeedForward",
    "GatedLayerInput",
    "GatedRMSNorm",
    "GatedShortConvolution",
    "GroupLimit",
    "GroupedQueryAttention",
    "HandedRouting",
    "HashRouter",
    "HyperConnected",
    "HyperConnection",
    "IndexedAttention",
    "Inside",
    "JointRouter",
    "LatentAttention",
    "LayerInputs",
    "LayerNorm",
    "LeaveRouting",
    "Lifted",
    "LiftedRouter",
    "LightningAttention",
    "LightningIndexer",
    "Loop",
    "Mamba",
    "Mamba2",
    "MeanPooledIndexer",
    "MessageGate",
    "MixtureOfAttention",
    "MixtureOfExperts",
    "Normalise",
    "OaiSwiGLU",
    "PooledIndexer",
    "PositionScale",
    "ProductKeyRouter",
    "Projection",
    "RMSNorm",
    "RecurrentBlock",
    "RelativeAttention",
    "ResidualGate",
    "Rotary",
    "Routed",
    "Router",
    "Routing",
    "ScaledFirstRMSNorm",
    "SelfGatedRMSNorm",
    "SideBySide",
    "SoftcappedGLU",
    "SparseMixerRouter",
    "StreamMean",
    "StreamMerge",
    "TimeMix",
    "TopOneRouter",
]
