"""Mutants of what layers share and hand to one another, from pass to pass too, and of encoders."""

from zoo.mutants import (
    Mutant,
    argument,
    left_by_the_one_before,
    looped,
    positions,
    wired_again,
)

_HANDED = r"loop, which hands layers\.2 in pass 2"
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
    Mutant("growth of queries handed to layers", "beam", r"query_scale, for what model\.layers\.1\.self_attn",
           argument("query_scale.factor", 0.2), rung="L1"),
    Mutant("scale of the inputs of layers", "gemma4", r"layer_inputs, for model: output",
           argument("layer_inputs.scale", 0.5), rung="L1"),
    Mutant("eps of the inputs of layers", "gemma4", r"layer_inputs, for model",
           argument("layer_inputs.norm.eps", 1e-5), rung="L1"),
    Mutant("keys left under another name", "gemma4", r"layers\.2\.mixer, for \S*: 'keys\.full_attention' is not left",
           argument("mixer.leaves", "sliding_attention"), rung="L1"),
    Mutant("keys of another kind of layer", "gemma4", r"layers\.3\.mixer, for",
           argument("mixer.takes", "sliding_attention"), rung="L1"),
    Mutant("latents not left", "mistral_large4", r"layers\.1\.mixer, for \S*: 'latents\.rope' is not left",
           argument("mixer.leaves", None), rung="L1"),
    # layers that run several times
    Mutant("scale of the messages", "inkling2_loop", r"loop\.message, for model\.message_input",
           argument("loop.message.scale", lambda scale: 1.01 * scale), rung="L1"),
    Mutant("eps of a message's gate", "inkling2_loop", r"layers\.2\.mixer_input_2, for \S*q_message_gate",
           argument("mixer_input_2.eps", 1e-4), rung="L1"),
    Mutant("one pass more", "inkling2_loop", r"loop, which runs layers 2-5 4 times",
           looped(passes=lambda count: count + 1), rung="L1"),
    Mutant("message of another part", "inkling2_loop", r"what layers\.3\.mixer_input_2 in pass 3 reads",
           wired_again("mixer_input_2", "residual.1, message.2"), rung="L1"),
    Mutant("a layer fewer runs several times", "inkling2_loop", r"loop", looped(count=lambda count: count - 1)),
    Mutant("later passes wired as the first", "inkling2_loop", r"what layers\.2\.mixer_input_2 in pass 2", code=(
        "nn.decoder_layer", "self.wiring if message is None or self.again is None else self.again", "self.wiring")),
    Mutant("a message is added", "inkling2_loop", r"for \S*q_message_gate", code=(
        "nn.message_gate", "(1 - forget) * x + take", "x + take")),
    Mutant("messages dealt out backwards", "inkling2_loop", _HANDED, code=(
        "nn.loop", "for number in range(self.count)]", "for number in reversed(range(self.count))]")),
    Mutant("messages of the next layer", "inkling2_loop", _HANDED, code=(
        "nn.loop", "made[number * each : (number + 1) * each]",
        "(made * 2)[(number + 1) * each : (number + 2) * each]")),
    Mutant("messages dealt out one to a layer", "inkling2_loop", _HANDED, code=(
        "nn.loop", "made[number * each : (number + 1) * each]", "made[number :: self.count]")),
    Mutant("messages of a layer in another order", "inkling2_loop", _HANDED, code=(
        "nn.loop", "made[number * each : (number + 1) * each]", "made[number * each : (number + 1) * each][::-1]")),
    Mutant("messages of the first pass for ever", "inkling2_loop", r"loop\.message in pass 3", code=(
        "nn.loop", "self._messages(before, x))",
        "messages := locals().get('messages') or self._messages(before, x))")),
    Mutant("messages of where the pass began", "inkling2_loop", r"loop\.message in pass 2", code=(
        "nn.loop", "x[len(before) :]", "x[len(before) - 1 :]")),
    Mutant("a pass that goes on", "inkling2_loop", r"what layers\.2 in pass 2 reads", code=(
        "nn.loop", "before if self.restarts else x", "x")),
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
]  # fmt: skip
