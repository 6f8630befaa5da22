"""Specifications of a plain mixture of experts, as tests need them."""

from typing import Any

from dayzero.runtime.block_spec import BlockSpec


def routed(hidden: int, experts: int, top_k: int, width: int, renormalise: bool = False, **router: Any) -> BlockSpec:
    """Softmax routing, SwiGLU experts. router: further arguments of the router."""
    arguments: dict[str, Any] = {"hidden": hidden, "experts": experts, "top_k": top_k, **router}
    if renormalise:
        arguments["normalise"] = BlockSpec(block="Normalise", arguments={})
    sizes = {"experts": experts, "hidden": hidden, "width": width, "act": "silu"}
    return BlockSpec(
        block="MixtureOfExperts",
        arguments={
            "router": BlockSpec(block="Router", arguments=arguments),
            "experts": BlockSpec(block="Experts", arguments=sizes),
        },
    )
