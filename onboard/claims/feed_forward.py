"""Claims about feed-forward layers: their activation and whether it gates."""

from typing import Any

from dayzero.onboard.claims.shown import Layer, Shown, Verdict, all_are, argument
from dayzero.runtime.block_spec import BlockSpec

# What configs call the functions of `runtime.nn.activation`.
_CALLED = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "relu2": "relu2",
}


def projection(value: Any, shown: Shown) -> Verdict | None:
    """An activation, or `gated-` and an activation; where it gates, gelu is approximated by tanh."""
    gates, _, name = value.rpartition("-") if isinstance(value, str) else ("", "", None)
    if name not in _CALLED or gates not in ("", "gated"):
        return None
    act = "gelu_tanh" if (gates, name) == ("gated", "gelu") else _CALLED[name]
    return all_are(
        f"{gates} {act}".strip(),
        [_form(block) for block in shown.blocks(_forms)],
        "feed-forward layers",
        shown.hides_ffns,
    )


def _forms(layer: Layer) -> list[BlockSpec]:
    """Those of experts too, but for experts that are the projections of an attention."""
    experts = [argument(mixture, "experts") for mixture in layer.mixtures]
    return [*layer.of({"GatedFeedForward", "FeedForward"}), *experts]


def _form(block: BlockSpec) -> str:
    gated = block.block == "GatedFeedForward" or (block.block == "Experts" and argument(block, "is_gated"))
    return f"{'gated ' if gated else ''}{argument(block, 'act')}"
