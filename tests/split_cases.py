"""Small blocks of every kind that mixes tokens or is cut over ranks, for tests of tensor and context parallelism."""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from dayzero.runtime import nn
from dayzero.runtime.lora import apply_lora
from dayzero.runtime.nn.context import Context, positions_of
from dayzero.runtime.nn.layer_inputs import LAYER_INPUT
from dayzero.runtime.nn.selected_attention import SELECTED

HIDDEN = 16
Build = Callable[[], torch.nn.Module]


def gqa(kv_heads: int = 2, **more) -> nn.GroupedQueryAttention:
    return nn.GroupedQueryAttention(HIDDEN, 4, kv_heads, 6, 6**-0.5, **more)


def latent(**more) -> nn.LatentAttention:
    sizes = {"nope_dim": 5, "rope_dim": 6, "value_dim": 4, "kv_rank": 7, "scale": 0.3}
    return nn.LatentAttention(HIDDEN, 4, **{**sizes, **more})


def lightning(source: int) -> nn.LightningIndexer:
    return nn.LightningIndexer(HIDDEN, source, 3, 8, top_k=4, key_norm_eps=1e-6, rotary="half")


def ffn(**more) -> nn.GatedFeedForward:
    return nn.GatedFeedForward(HIDDEN, 12, "silu", **more)


def routed(router: nn.Routing, **more) -> nn.MixtureOfExperts:
    return nn.MixtureOfExperts(router, nn.Experts(4, HIDDEN, 8, "silu"), **more)


def compressed(**more) -> nn.CompressedAttention:
    settings = {"groups": 2, "output_rank": 3, "query_norm_eps": 1e-6, "key_norm_eps": 1e-6, "window": 3}
    return nn.CompressedAttention(HIDDEN, 4, 6, 7, 0.4, **{**settings, **more})


def delta(**more) -> nn.GatedDeltaNet:
    sizes = {"heads": 4, "key_heads": 2, "key_dim": 5, "value_dim": 3, "conv_width": 4}
    return nn.GatedDeltaNet(HIDDEN, norm_eps=1e-6, l2_eps=1e-6, **{**sizes, **more})


def mamba2(**more) -> nn.Mamba2:
    return nn.Mamba2(HIDDEN, **{"heads": 4, "head_dim": 3, "state": 5, "conv_width": 4, "groups": 2, **more})


class Streams(torch.nn.Module):
    """A block between two copies of the stream."""

    uses_context = True
    parallel_inner = ("inner",)

    def __init__(self, gated: bool):
        super().__init__()
        if gated:
            self.inner = nn.HyperConnected(nn.GatedConnection(HIDDEN, 2, 3, 1e-6), None, gqa())
        else:
            connection = nn.HyperConnection(HIDDEN, 2, 1e-6, 1e-6, iterations=3)
            self.inner = nn.HyperConnected(connection, nn.RMSNorm(HIDDEN, 1e-6), gqa())

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.inner(torch.stack([x, x.flip(1)], 1), context).flatten(1)[:, ::2]


class SharedKeys(torch.nn.Module):
    """Attention with the keys and values of one before it."""

    uses_context = True
    parallel_inner = ("first", "second")

    def __init__(self, kv_heads: int):
        super().__init__()
        self.first, self.second = gqa(kv_heads, leaves="a", qk_norm="head"), gqa(kv_heads, takes="a", qk_norm="head")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.second(x + self.first(x, context), context)


class OwnInput(torch.nn.Module):
    """A part that reads the layer's own input, which is made of the rank's own rows."""

    uses_context = True
    parallel_inner = ("make", "gate")

    def __init__(self):
        super().__init__()
        self.make, self.gate = torch.nn.Linear(HIDDEN, 6), nn.GatedLayerInput(HIDDEN, 6, "gelu")

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.gate(x, replace(context, shared={**context.shared, LAYER_INPUT: self.make(x)}))


class RoutedBefore(torch.nn.Module):
    """Experts whose router is another part."""

    uses_context = True
    parallel_inner = ("leave", "mixture")

    def __init__(self):
        super().__init__()
        self.leave = nn.LeaveRouting(nn.Router(HIDDEN, 4, 2))
        self.mixture = routed(nn.HandedRouting(4, 2), shared=ffn())

    def forward(self, x: Tensor, context: Context) -> Tensor:
        return self.leave(x, context).sum(-1, keepdim=True) + self.mixture(x, context)


def adapted(block: torch.nn.Module) -> torch.nn.Module:
    apply_lora(block, rank=2, alpha=4)
    return block


CASES: dict[str, Build] = {
    "attention": lambda: gqa(bias=True, output_bias=True),
    "attention-one-kv-head": lambda: gqa(1, bias=True, qk_norm="head", convolution=3),
    "attention-window-sinks-gate": lambda: gqa(
        window=4, sinks=True, gate="sigmoid", gate_per_head=True, gate_bias=True, qk_norm="head", softcap=5.0
    ),
    "attention-norm-of-all-heads": lambda: gqa(4, qk_norm="whole", qk_norm_offset=1.0, convolution=3, gate="silu"),
    "attention-chunks": lambda: gqa(chunk=4, value_norm_eps=1e-6, query_scale="log", value_is_key=True),
    "attention-both-ways": lambda: gqa(causal=False, window=3),
    "attention-shared-keys": lambda: SharedKeys(2),
    "attention-shared-key": lambda: SharedKeys(1),
    "attention-lora": lambda: adapted(gqa(1, bias=True, output_bias=True)),
    "attention-additions": lambda: nn.Adapted(gqa(1, qk_norm="head"), [["query"], ["key"]], rank=3, uses=2),
    "feed-forward-additions": lambda: nn.Adapted(ffn(bias=True), [["gate", "up"]], rank=3),
    "mixture-of-attention": lambda: nn.MixtureOfAttention(
        nn.Router(HIDDEN, 4, 2, scored="selected"), nn.Experts(4, HIDDEN, 12, None, is_gated=False), 2, 0.4, bias=True
    ),
    "attention-distance-bias": lambda: nn.DistanceBiasedAttention(gqa(rotary=None), 8, 20),
    "attention-dynamic-mask": lambda: nn.DynamicMaskAttention(gqa(qk_norm="head"), 3, bias=True),
    "relative-attention": lambda: nn.RelativeAttention(gqa(rotary=None), 3, 5),
    "latent": latent,
    "latent-gate-sinks": lambda: latent(
        query_rank=5, key_norm_eps=1e-6, gate="element", gate_from="query", sinks=True, window=5, query_from="both",
        learned_position_scale=True, position_scale=0.3, position_step=2,
    ),
    "latent-indexer": lambda: latent(query_rank=5, indexer=lightning(5), gate="head"),
    "latent-lora": lambda: adapted(latent(query_rank=5)),
    "indexed-attention": lambda: nn.IndexedAttention(gqa(), lightning(HIDDEN)),
    "indexed-attention-blocks": lambda: nn.IndexedAttention(gqa(), nn.BlockIndexer(HIDDEN, 2, 6, 2, 2, 1, 1e-6)),
    "compressed-attention": lambda: compressed(compressor=nn.Compressor(HIDDEN, 6, 2, 1e-6, overlap=True)),
    "compressed-attention-indexer": lambda: compressed(
        compressor=nn.Compressor(HIDDEN, 6, 2, 1e-6),
        indexer=nn.CompressedIndexer(HIDDEN, 7, 3, 2, nn.Compressor(HIDDEN, 6, 2, 1e-6)),
        head_norm_eps=1e-6,
    ),
    "gated-delta-net": lambda: delta(conv_bias=True),
    "gated-delta-net-channels": lambda: delta(
        channel_decay=True, bound=-4.0, decay_rank=3, gate_rank=3, key_heads=1, gate_act="sigmoid"
    ),
    "mamba": lambda: nn.Mamba(HIDDEN, 12, 3, 2, 4, norm="weighted", norm_eps=1e-6, bias=True, output_bias=True),
    "mamba-heads": lambda: nn.Mamba(HIDDEN, 12, 3, 2, 4, heads=2),
    "mamba2": lambda: mamba2(bias=True, output_bias=True, multipliers=[0.5, 2.0, 0.7, 1.3, 0.9]),
    "mamba2-one-group": lambda: mamba2(groups=1, norm="norm_first", norm_groups=4, time_step_max=0.6),
    "lightning": lambda: nn.LightningAttention(HIDDEN, 4, 5, 1e-6),
    "mlstm": lambda: nn.MLSTM(HIDDEN, 4, 5, 3, 1e-6, 1e-6, soft_cap=9.0, bias=True, norm_bias=True, output_bias=True),
    "recurrent-block": lambda: nn.RecurrentBlock(HIDDEN, 12, 2, 4, "gelu"),
    "short-convolution": lambda: nn.GatedShortConvolution(HIDDEN, 12, 4, bias=True, conv_bias=True, output_bias=True),
    "time-mix": lambda: nn.TimeMix(HIDDEN, 12),
    "channel-mix": lambda: nn.ChannelMix(HIDDEN, 12),
    "convolution-residual": lambda: nn.ConvolutionResidual(HIDDEN, 3, 2.0, bias=True),
    "hyper-connected": lambda: Streams(gated=False),
    "gated-streams": lambda: Streams(gated=True),
    "gated-feed-forward": lambda: ffn(bias=True, gate_scale=1.5, output_scale=0.5, learned_scale=True),
    "gated-feed-forward-lora": lambda: adapted(ffn(bias=True)),
    "feed-forward": lambda: nn.FeedForward(HIDDEN, 12, "gelu", bias=True),
    "mixture": lambda: routed(nn.Router(HIDDEN, 4, 2), shared=ffn(bias=True), shared_gate=True, bias=True),
    "mixture-routed-before": RoutedBefore,
    "gated-layer-input": OwnInput,
    "mixture-joint": lambda: routed(nn.JointRouter(HIDDEN, 4, 2, 2), shared=ffn(parts=2)),
    "mixture-hashed": lambda: routed(nn.HashRouter(HIDDEN, 4, 2, 11)),
    "mixture-capacity": lambda: routed(nn.TopOneRouter(HIDDEN, 5, 2)),
    "mixture-product-keys": lambda: routed(nn.ProductKeyRouter(HIDDEN, 4, 2)),
    "mixture-carried": lambda: routed(nn.CarriedRouter(HIDDEN, 4, 2, 6, 1e-6, "silu", carried=False)),
}  # fmt: skip


def build(name: str, seed: int = 0) -> torch.nn.Module:
    """The block with all its weights drawn, in float64."""
    block = CASES[name]().double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.5)
        for name, buffer in block.named_buffers():
            if name.endswith("selection_bias"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator) * 0.1)
        for module in block.modules():
            if isinstance(module, nn.HashRouter):
                module.table.copy_(torch.randint(0, 4, module.table.shape, generator=generator))
            if isinstance(module, nn.LightningAttention):
                module.slope.copy_(torch.rand(module.slope.shape, generator=generator) + 0.1)
    return block


def context_of(lengths: tuple[int, ...]) -> Context:
    """Of documents with these lengths; ids below 11, and rotary tables of three pairs."""
    tokens = sum(lengths)
    position = positions_of(lengths, torch.device("cpu"))
    ids = torch.randint(0, 11, (tokens,), generator=torch.Generator().manual_seed(5))
    table = nn.Rotary(6, 10000.0)(position, torch.float64)
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
    return Context(bounds, lengths, position, (table,), ids)


def call(block: torch.nn.Module, x: Tensor, context: Context) -> Tensor:
    if SELECTED in context.shared:
        context = replace(context, shared={})
    return block(x, context) if getattr(block, "uses_context", False) else block(x)
