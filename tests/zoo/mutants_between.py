"""More mutants: what layers share and hand to one another, encoders, and experts that are not a feed-forward part.

In which order a loop deals out its messages no rung can say: of the little that a shrunk model keeps within a pass,
they are all alike. tests/runtime/nn/test_loop.py holds the loop to it.
"""

from typing import Any

from zoo.mutants import Change, Mutant, argument

from dayzero.runtime.spec import BlockSpec, ModelSpec


def looped(**fields: Any) -> Change:
    """Fields of the loop, as functions of what they are."""

    def change(spec: ModelSpec) -> ModelSpec:
        assert spec.loop is not None
        held = {name: made(getattr(spec.loop, name)) for name, made in fields.items()}
        return spec.model_copy(update={"loop": spec.loop.model_copy(update=held)})

    return change


def positions(name: str, made: Any) -> Change:
    """An argument of what is added to the decoder's embeddings, as a function of what it is."""

    def change(spec: ModelSpec) -> ModelSpec:
        assert spec.positions is not None
        block = _given(spec.positions, name, made(spec.positions.arguments[name]))
        return spec.model_copy(update={"positions": block})

    return change


def left_by_the_one_before(spec: ModelSpec) -> ModelSpec:
    """What a kind of layer leaves for later ones is left by the kind before it."""
    kinds = list(spec.layer_kinds)
    for number in range(1, len(kinds)):
        if (name := kinds[number].blocks["mixer"].arguments.get("leaves")) is None:
            continue
        for other, leaves in ((number, None), (number - 1, name)):
            parts = [
                part.model_copy(update={"block": _given(part.block, "leaves", leaves)})
                if part.name == "mixer"
                else part
                for part in kinds[other].parts
            ]
            kinds[other] = kinds[other].model_copy(update={"parts": parts})
    return spec.model_copy(update={"layer_kinds": kinds})


def _given(block: BlockSpec, name: str, value: Any) -> BlockSpec:
    return block.model_copy(update={"arguments": {**block.arguments, name: value}})


_EXPERTS_OF_ATTENTION = r"layers\.0\.mixer, for \S*self_attention"
_OF_THE_ENCODER = r"encoder\.layers\.0\.mixer, for"

BETWEEN = [
    # what layers share, leave for one another and are handed
    Mutant("additions of another use", "zamba2", r"layers\.1\.mixer, for \S*shared_transformer\.self_attn", code=(
        "nn.adapted", "self.uses[context.use]", "self.uses[context.use - 1]")),
    Mutant("additions left out", "zamba2", r"layers\.1\.ffn, for \S*shared_transformer\.feed_forward", code=(
        "nn.adapted", "return out + addition.up[name](low[0][1])", "return out + 0 * addition.up[name](low[0][1])")),
    Mutant("latents of the layer before", "mistral_large4", r"layers\.[012]\.mixer", left_by_the_one_before),
    Mutant("stretch of the frequencies ignored", "mistral_large4", r"rotaries\.0, for", code=(
        "nn.rotary", "angle * self.log_stretch.to(compute).exp()", "angle + 0 * self.log_stretch.sum()")),
    Mutant("input of another layer", "gemma4", r"layers\.0\.gated_input", code=(
        "nn.causal_lm", "{LAYER_INPUT: inputs[:, number]}", "{LAYER_INPUT: inputs[:, number - 1]}")),
    Mutant("a layer fewer runs several times", "inkling2_loop", r"loop", looped(count=lambda count: count - 1)),
    Mutant("later passes wired as the first", "inkling2_loop", r"what layers\.2\.mixer_input_2 in pass 2", code=(
        "nn.decoder_layer", "self.wiring if message is None or self.again is None else self.again", "self.wiring")),
    Mutant("a message is added", "inkling2_loop", r"for \S*q_message_gate", code=(
        "nn.message_gate", "(1 - forget) * x + take", "x + take")),
    # encoders
    Mutant("states without their norm", "switch_transformers", r"layers\.0\.cross, for \S*EncDecAttention", code=(
        "nn.encoder", "Source(self.norm(x), lengths)", "Source(x, lengths)")),
    Mutant("an encoder that sees backwards only", "switch_transformers", _OF_THE_ENCODER,
           argument("mixer.attention.causal", True)),
    Mutant("distances one way", "switch_transformers", _OF_THE_ENCODER, argument("mixer.both_ways", False)),
    Mutant("farthest distance", "switch_transformers", _OF_THE_ENCODER, argument("mixer.max_distance", 64)),
    Mutant("positions one early", "nllb_moe", r"positions, for \S*embed_positions",
           positions("first", lambda first: first - 1)),
    Mutant("padding has positions", "nllb_moe", r"positions, for \S*embed_positions",
           positions("padding", lambda padding: None)),
    # routers and experts
    Mutant("capacity by one", "switch_transformers", r"\.ffn, for \S*mlp",
           argument("ffn.router.capacity", lambda capacity: capacity - 1)),
    Mutant("width of what is near", "phimoe", r"layers\.0\.ffn, for", argument("ffn.router.jitter", 0.02)),
    Mutant("weights of attention experts", "jetmoe", _EXPERTS_OF_ATTENTION, code=(
        "nn.mixture_of_attention", 'routed("out_of", rows.flatten(0, 1), weights.reshape(-1, 1))',
        'routed("out_of", rows.flatten(0, 1), torch.ones_like(weights).reshape(-1, 1))')),
    Mutant("choices and heads of attention experts", "jetmoe", _EXPERTS_OF_ATTENTION, code=(
        "nn.mixture_of_attention", "attended.unflatten(1, (self.kv_heads, choices)).transpose(1, 2)",
        "attended.unflatten(1, (choices, self.kv_heads))")),
    Mutant("bias of attention experts", "jetmoe", _EXPERTS_OF_ATTENTION, code=(
        "nn.mixture_of_attention", "return y if self.bias is None else y + self.bias", "return y")),
    # recurrent mixers
    Mutant("the token's own bonus", "rwkv", r"layers\.0\.mixer, for", code=(
        "nn.rwkv", "(k_n + bonus.to(wide))[:, None]", "k_n[:, None]")),
    Mutant("decay at half the slope", "minimax", r"layers\.1\.mixer, for", code=(
        "nn.lightning_attention", "-self.slope.to(", "-0.5 * self.slope.to(")),
]  # fmt: skip
