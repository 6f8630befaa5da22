"""A model of the size that plans are for, as a specification alone."""

from routed import routed

from dayzero.runtime.spec import BlockSpec, CheckpointId, LayerKind, LayerRun, ModelSpec


def block(name, **arguments):
    return BlockSpec(block=name, arguments=arguments)


def large():
    """61 layers with 256 experts, 3 dense first: about 671 billion parameters."""
    hidden = 7168
    norm = block("RMSNorm", width=hidden, eps=1e-6)
    shape = {"hidden": hidden, "heads": 64, "kv_heads": 8, "head_dim": 128}
    attention = block("GroupedQueryAttention", **shape, scale=128**-0.5)
    dense = block("GatedFeedForward", hidden=hidden, width=18432, act="silu")
    identity = {"architecture": "X", "config_sha256": "", "headers_sha256": "", "tensors": 1, "bytes": 1}
    return ModelSpec(
        name="large",
        checkpoint=CheckpointId(**identity, dtypes={"F8_E4M3": 900, "F32": 800}),
        vocabulary=129280,
        hidden=hidden,
        tied=False,
        rotaries=[block("Rotary", dim=128, theta=1e4)],
        layer_kinds=[LayerKind.pre_norm(norm, attention, norm, ffn) for ffn in (dense, routed(hidden, 256, 8, 2048))],
        layers=[LayerRun(first=0, count=3, kind=0), LayerRun(first=3, count=58, kind=1)],
        norm=norm,
        rules=[],
    )


def with_fields(spec, **fields):
    """Another specification, validated."""
    return ModelSpec(**{name: getattr(spec, name) for name in ModelSpec.model_fields} | fields)


def uniform(large, dense=0):
    """Every layer a mixture, but for the first so many."""
    runs = [LayerRun(first=0, count=dense, kind=0)] if dense else []
    return with_fields(large, layers=[*runs, LayerRun(first=dense, count=61 - dense, kind=1)])
