"""Mutants of what is inside a block, of how the blocks of a layer are wired, and of what is around the layers."""

from zoo.mutants import (
    Mutant,
    argument,
    exchanged_layers,
    exchanged_rules,
    experts_exchanged,
    in_order,
    reversed_parts,
    rule,
    untransposed,
    whole,
    wired,
)

from dayzero.runtime.spec import SourceSpec

_EXPERTS_OF_ATTENTION = r"layers\.0\.mixer, for \S*self_attention"

OF_BLOCKS = [
    # norms
    Mutant("w for 1 + w", "recurrent_gemma", r"layers\.0\.mixer_norm, for", argument("mixer_norm.offset", 0.0)),
    Mutant("1 + w for w", "mixtral", r"layers\.0\.mixer_norm, for \S*input_layernorm",
           argument("mixer_norm.offset", 1.0)),
    Mutant("wrong eps", "mixtral", r"layers\.0\.ffn_norm, for \S*post_attention", argument("ffn_norm.eps", 1.1e-5)),
    Mutant("wrong eps of the last norm", "gpt_oss", r"\bnorm, for model\.norm", argument("norm.eps", 1e-6)),
    Mutant("eps of a latent's norm", "deepseek_v3", r"layers\.0\.mixer, for", argument("mixer.kv_norm_eps", 1e-5)),
    Mutant("eps of the query's latent", "deepseek_v3", r"\.mixer, for", argument("mixer.query_norm_eps", 1.5e-6)),
    Mutant("mean not taken away", "cohere2_moe", r"layers\.0\.norm, for", code=(
        "nn.layer_norm", "F.layer_norm(x.to(wide), (self.width,), weight, bias, self.eps)",
        "F.rms_norm(x.to(wide), (self.width,), weight, self.eps)")),
    # attention
    Mutant("rotary form", "mixtral", r"layers\.0\.mixer, for", argument("mixer.rotary", "interleaved")),
    Mutant("rotary form of a latent", "deepseek_v3", r"\.mixer, for", argument("mixer.rotary", "half")),
    Mutant("rotary where there is none", "cohere2_moe", r"layers\.3\.mixer|mixer, for \S*3\.self_attn",
           argument("mixer.rotary", lambda held: held or "interleaved")),
    Mutant("rope base", "gpt_oss", r"rotaries\.0, for model\.rotary_emb", argument("rotaries.0.theta", 10000.0)),
    Mutant("yarn's factor", "gpt_oss", r"rotaries\.0, for", argument("rotaries.0.factor", 16.0)),
    Mutant("yarn's attention factor", "gpt_oss", r"rotaries\.0, for", argument("rotaries.0.attention_factor", 1.0)),
    Mutant("yarn's bounds rounded", "gpt_oss", r"rotaries\.0, for", argument("rotaries.0.truncate", True)),
    Mutant("rope base of the other table", "deepseek_v4", r"layers\.1\.mixer\.block, for",
           argument("rotaries.1.theta", 10000.0)),
    Mutant("the other table", "deepseek_v4", r"layers\.0\.mixer\.block, for",
           argument("mixer.block.table", lambda table: 1 - table)),
    Mutant("window by one", "mixtral", r"layers\.0\.mixer, for", argument("mixer.window", lambda window: window + 1)),
    Mutant("no window", "gpt_oss", r"layers\.0\.mixer, for", argument("mixer.window", None)),
    Mutant("chunks by one", "llama4", r"\.mixer, for", argument("mixer.chunk", lambda chunk: chunk + 1)),
    Mutant("softmax scale", "granitemoe", r"\.mixer, for", argument("mixer.scale", 0.25)),
    Mutant("no norm of queries and keys", "lfm2_moe", r"mixer", argument("mixer.qk_norm", "none")),
    Mutant("norm over all heads at once", "minimax_m2", r"mixer", argument("mixer.qk_norm", "head")),
    Mutant("no growth of queries", "llama4", r"\.mixer, for", argument("mixer.query_scale_factor", 0.0)),
    Mutant("output gate doubled", "afmoe", r"\.mixer, for", code=(
        "nn.attention", "GATES[self.gate_act](gate.to(compute))", "(2 * GATES[self.gate_act](gate.to(compute)))")),
    Mutant("value factor dropped", "mimo_v2_flash", r"\.mixer, for", argument("mixer.value_factor", 1.0)),
    Mutant("sinks ignored", "gpt_oss", r"\.mixer, for",
           code=("nn.attention", "            self.sinks,\n            bias,",
           "            None,\n            bias,")),
    Mutant("key and value exchanged", "mixtral", r"layers\.0\.mixer, for",
           exchanged_rules("mixer.key.weight", "mixer.value.weight")),
    Mutant("key rows in turn", "mixtral", r"layers\.0\.mixer, for", rule(
        "mixer.key.weight", lambda source: SourceSpec(op="deinterleave", dim=0, ways=2, parts=[source]))),
    Mutant("fewer keys selected", "glm_moe_dsa", r"\.mixer, for", argument("mixer.indexer.top_k", lambda k: k - 1)),
    Mutant("indexer's rotary at the end", "glm_moe_dsa", r"\.mixer, for", argument("mixer.indexer.rotary_at", "last")),
    # routers
    Mutant("softmax before the selection", "gpt_oss", r"\.ffn, for", argument("ffn.router.scored", "all")),
    Mutant("softmax after the selection", "qwen2_moe", r"\.ffn, for", argument("ffn.router.scored", "selected")),
    Mutant("not renormalised", "mixtral", r"layers\.0\.ffn, for", argument("ffn.router.normalise", None)),
    Mutant("eps of the weights' sum", "lfm2_moe", r"\.ffn, for", argument("ffn.router.normalise.eps", 1e-9)),
    Mutant("vanishing eps of the weights' sum", "deepseek_v3", r"constant 1e-20",
           argument("ffn.router.normalise.eps", 0.0)),
    Mutant("scaling dropped", "deepseek_v3", r"layers\.1\.ffn, for", argument("ffn.router.scale", 1.0)),
    Mutant("one group more", "deepseek_v3", r"layers\.1\.ffn, for", argument("ffn.router.limit.kept", 3)),
    Mutant("groups by their best", "deepseek_v3", r"layers\.1\.ffn, for", argument("ffn.router.limit.by", "max")),
    Mutant("no groups", "deepseek_v3", r"layers\.1\.ffn, for", argument("ffn.router.limit", None)),
    Mutant("groups filled with zero", "deepseek_v3", r"layers\.1\.ffn, for",
           argument("ffn.router.limit.zero_fill", True)),
    Mutant("softmax for sigmoid", "minimax_m2", r"\.ffn, for", argument("ffn.router.score", "softmax")),
    Mutant("one expert fewer", "mixtral", r"layers\.0\.ffn, for", argument("ffn.router.top_k", lambda k: k - 1)),
    Mutant("bias used in the weight", "minimax_m2", r"\.ffn, for", code=(
        "nn.router", "weights = scored_by(self.score, logits)",
        "weights = scored_by(self.score, logits) + self.selection_bias[index]")),
    Mutant("bias used in the weight where nothing is trained", "minimax_m2", r"\.ffn, for \S+: output without", code=(
        "nn.router", "weights = scores.gather(-1, index)",
        "weights = (scores if self.selection_bias is None else scores + self.selection_bias).gather(-1, index)")),
    Mutant("correction bias taken as zero", "deepseek_v3", r"layers\.1\.ffn, for", code=(
        "nn.router", "scores = scores + self.selection_bias", "scores = scores + 0 * self.selection_bias")),
    Mutant("correction bias in bfloat16", "deepseek_v3", r"layers\.1\.ffn, for", code=(
        "nn.router", "scores = scores + self.selection_bias", "scores = scores + self.selection_bias.bfloat16()")),
    Mutant("correction bias from another tensor", "minimax_m2", r"selection_bias|ffn", rule(
        "router.selection_bias", lambda source: source.model_copy(update={"name": "model.norm.weight"}))),
    # experts
    Mutant("gate and up exchanged", "mixtral", r"layers\.0\.ffn, for", rule("experts.gate_up", reversed_parts)),
    Mutant("gate and up not taken apart", "gpt_oss", r"\.ffn, for", rule("experts.gate_up", in_order)),
    Mutant("experts transposed", "gpt_oss", r"experts\.down|ffn", rule("experts.down", untransposed)),
    Mutant("experts exchanged", "mixtral", r"layers\.0\.ffn, for|experts\.down",
           rule("experts.down", experts_exchanged)),
    Mutant("clamp after the activation", "deepseek_v4", r"layers\.0\.ffn\.block, for \S+mlp",
           argument("ffn.block.experts.act.after", True)),
    Mutant("limit of the clamp", "gpt_oss", r"\.ffn, for", argument("ffn.experts.act.limit", 6.0)),
    Mutant("slope of the gate", "gpt_oss", r"\.ffn, for", argument("ffn.experts.act.alpha", 1.7)),
    Mutant("gelu for silu", "mixtral", r"layers\.0\.ffn, for", argument("ffn.experts.act", "gelu")),
    Mutant("tanh form of gelu", "recurrent_gemma", r"\.ffn, for", argument("ffn.act", "gelu")),
    Mutant("weights on the output", "llama4", r"\.ffn, for", argument("ffn.weigh", "output")),
    Mutant("shared experts averaged, or not", "cohere2_moe", r"\.ffn, for", argument("ffn.average", False)),
    Mutant("gate of the shared expert open", "qwen2_moe", r"\.ffn, for", code=(
        "nn.moe", "torch.sigmoid(", "torch.ones_like(")),
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
    Mutant("decay grows", "kimi_linear", r"layers\.0\.mixer, for", code=(
        "nn.gated_delta_net", "return -rate * F.softplus(u)", "return rate * F.softplus(u) * 1e-3")),
    Mutant("A_log taken as A", "mamba2", r"layers\.0\.mixer, for", code=(
        "nn.mamba2", "decay = -self.A_log.to(wide).exp() * dt", "decay = -self.A_log.to(wide).abs() * dt")),
    Mutant("convolution turned round", "mamba2", r"layers\.0\.mixer, for", code=(
        "nn.causal_convolution", "weight[:, None], bias", "weight.flip(1)[:, None], bias")),
    Mutant("taps of the convolution turned round", "lfm2_moe", r"\.mixer, for", code=(
        "nn.causal_convolution", "weight[:, None], bias", "weight.flip(1)[:, None], bias")),
    Mutant("gate after the norm", "mamba2", r"layers\.0\.mixer, for", argument("mixer.norm", "norm_first")),
    Mutant("no groups in the norm", "mamba2", r"layers\.0\.mixer, for", argument("mixer.norm_groups", 1)),
    Mutant("time step clamped", "mamba2", r"layers\.0\.mixer, for", argument("mixer.time_step_min", 0.05)),
    Mutant("eps of unit length", "kimi_linear", r"layers\.0\.mixer, for", argument("mixer.l2_eps", 1e-5)),
    Mutant("beta doubled", "kimi_linear", r"layers\.0\.mixer, for", argument("mixer.beta_scale", 2.0)),
    Mutant("silu for the sigmoid gate", "kimi_linear", r"layers\.0\.mixer, for", argument("mixer.gate_act", "silu")),
    Mutant("rate of the recurrence", "recurrent_gemma", r"\.mixer, for", argument("mixer.rate", -4.0)),
    Mutant("query and key of the recurrence", "kimi_linear", r"layers\.0\.mixer, for",
           exchanged_rules("mixer.query.weight", "mixer.key.weight")),
    Mutant("the token's own bonus", "rwkv", r"layers\.0\.mixer, for", code=(
        "nn.rwkv", "(k_n + bonus.to(wide))[:, None]", "k_n[:, None]")),
    Mutant("decay at half the slope", "minimax", r"layers\.1\.mixer, for", code=(
        "nn.lightning_attention", "-self.slope.to(", "-0.5 * self.slope.to(")),
    # the model
    Mutant("residual multiplier dropped", "granitemoe", r"what layers\.0\.ffn_norm reads",
           wired("ffn_norm", reads="x + mixer")),
    Mutant("residual multiplier of the sum", "granitemoe", r"what layers\.0 gives",
           wired("ffn", gives="x + 0.5 * mixer + ffn")),
    Mutant("parallel for serial", "mixtral", r"what layers\.0\.ffn_norm reads", wired("ffn_norm", reads="x")),
    Mutant("serial for parallel", "cohere2_moe", r"what layers\.0\.ffn reads", wired("ffn", reads="norm + mixer")),
    Mutant("residual dropped", "mixtral", r"what layers\.0 gives", wired("ffn", gives="mixer + ffn")),
    Mutant("embedding scale dropped", "granitemoe", r"what layers\.0 reads, the embeddings", whole(embed_scale=1.0)),
    Mutant("embedding scale in float32", "recurrent_gemma", r"what layers\.0 reads, the embeddings",
           whole(embed_scale=8.4852814)),
    Mutant("logit scale dropped", "cohere2_moe", r"the logits", whole(logit_scale=1.0)),
    Mutant("softcap dropped", "recurrent_gemma", r"the logits", whole(logit_softcap=None)),
    Mutant("streams' iterations", "deepseek_v4", r"layers\.0\.mixer\.connection, for",
           argument("mixer.connection.iterations", 19)),
    Mutant("layers one off", "lfm2_moe", r"layers\.\d", exchanged_layers),
    Mutant("windows one layer off", "cohere2_moe", r"layers\.\d", exchanged_layers),
    Mutant("head and embedding exchanged", "mixtral", r"embeddings|embed\.weight|head",
           exchanged_rules("embed.weight", "head.weight")),
]  # fmt: skip
