"""The grammar of tensor names: which part of a checkpoint a tensor belongs to, and its role there.

Roles describe and order. What a tensor is used for is settled by proof.
"""

import re
from collections.abc import Sequence

from dayzero.onboard.inspect.ledger import Part

_PARTS: tuple[tuple[Part, str], ...] = (
    ("projector", r"(^|\.)(mm_projector|multi_?modal_projector|vision_projector|projector|aligner|merger)(\.|$)"),
    ("vision", r"(^|\.)(vision_tower|vision_model|vision_encoder|visual|vit|image_newline|vision)(\.|$)"),
    ("audio", r"(^|\.)(audio_tower|audio_model|audio_encoder|audio)(\.|$)"),
    ("mtp", r"(^|\.)(mtp|nextn|mtp_\w+)(\.|$)"),
)
# What only a layer that predicts further tokens has: it joins the hidden state with the next token's embedding.
_MTP_LAYER = re.compile(r"\{layer\}\.(eh_proj|enorm|hnorm|shared_head|embed_tokens|final_layernorm|mtp_\w+)\b")

# Role -> what a name says. Order matters: the first that fits is taken.
_GRAMMAR: tuple[tuple[str, str], ...] = (
    ("rotary table", r"inv_freq$"),
    ("residual mixing", r"_res_(norm|proj)\b"),
    ("stream mixing", r"\b(hc|mhc)_\w+|hyper_connection"),
    ("indexer", r"\bindexer\b|\bindex_[qk]_(proj|norm)\b"),
    ("compressor", r"\bcompressor\b"),
    ("shared expert gate", r"shared_experts?_gate\b"),
    ("shared expert", r"shared_(experts?|mlp)\b"),
    ("router table", r"\btid2eid$"),
    ("router bias", r"(correction_bias|expert_bias)$|\bmoe_statics\b|\b(gate|router)\.bias$"),
    ("expert latent", r"\brouted_expert_(down|up)_proj\b|\bfc[12]_latent_proj\b"),
    ("norm", r"\brouted_expert_norm\b"),
    ("expert", r"\bexperts?[._]|\bexperts_\w+\."),
    ("router", r"\b(gate|router|wg)(\.(classifier|linear|layer|wg))?\.weight$"),
    ("join", r"\b(eh_proj|fc)\.weight$|\b(shared_head\.head)\.weight$"),
    ("attention sink", r"\bsinks?$|\battn_sink$|\bsink_bias$|attention_sink_bias$"),
    ("decay", r"\b(A_log|dt_bias|in_proj_a\.\w+|f_proj\.\w+|f_[ab]_proj\.\w+|dt_proj\.\w+|x_proj\.\w+|slope)$"),
    ("beta", r"\b(b_proj|in_proj_b)\.\w+$"),
    ("skip", r"\b(mixer|mamba|ssm)\.D$"),
    ("short convolution", r"conv1d\b|\bconv\.conv\b|_conv\.(weight|bias)$|\bshort_conv"),
    ("recurrent input", r"\bin_proj(_\w+)?\.(weight|bias)$"),
    ("key-value down", r"\b(kv_a_proj(_with_mqa)?|wkv_a|kv_down_proj)\."),
    ("key-value up", r"\b(kv_b_proj|wkv_b|kv_up_proj|[kv]_b_proj)\."),
    ("joint key-value", r"\b(wkv|kv_proj)\."),
    ("query down", r"\b(q_a_proj|wq_a|q_down_proj)\."),
    ("query up", r"\b(q_b_proj|wq_b|q_up_proj)\."),
    ("fused query-key-value", r"\b(qkv_proj|query_key_value|wqkv|c_attn|W_pack|qkv)\."),
    ("latent norm", r"\b(kv_a|q_a)_(layernorm|norm)\.|\bkv_norm\."),
    ("query norm", r"\b(q_norm|query_norm|q_layernorm|query_layernorm)\.weight$"),
    ("key norm", r"\b(k_norm|key_norm|k_layernorm|key_layernorm)\.weight$"),
    ("output norm", r"\b(o_norm|g_norm)\.weight$|(linear_attn|mixer|mamba)\.norm\.weight$"),
    ("query", r"\b(q_proj|query|wq)\.(weight|bias)$"),
    ("key", r"\b(k_proj|key|wk)\.(weight|bias)$"),
    ("value", r"\b(v_proj|value|wv)\.(weight|bias)$"),
    ("attention gate", r"\b(self_attn|attn|attention|linear_attn)\.(g_proj|g_[ab]_proj|output_gate)\."),
    ("recurrent output", r"\b(linear_attn|mixer|mamba|conv)\.out_proj\."),
    ("attention output", r"(attn|attention|mixer)\.(\{\w+\}\.)?(o_proj|out_proj|dense|wo|wo_[ab])\.(weight|bias)$"),
    (
        "feed-forward",
        r"\b(gate_proj|up_proj|down_proj|w1|w2|w3|w12|gate_up_proj|c_fc|fc1|fc2|dense_h_to_4h|dense_4h_to_h)\.(weight|bias)$",
    ),
    ("norm", r"(norm|layernorm|\bln_?\w*)[^.]*\.(weight|bias)$|\b[eh]norm\.weight$"),
    ("embedding", r"\b(embed_tokens|word_embeddings|wte|tok_embeddings|embed|embeddings)\.weight$"),
    ("head", r"\b(lm_head|output|head|unembed)\.weight$"),
)  # fmt: skip
_COMPILED = tuple((role, re.compile(pattern)) for role, pattern in _GRAMMAR)


def part_of(pattern: str) -> Part:
    """The part of the checkpoint that a pattern belongs to, by its own name."""
    for part, words in _PARTS:
        if re.search(words, pattern):
            return part
    return "text"


def joins_embeddings(pattern: str) -> bool:
    """Whether a layer with such a tensor predicts further tokens."""
    return _MTP_LAYER.search(pattern) is not None


def role_of(pattern: str, shape: Sequence[int]) -> str:
    """The role that the name suggests; `unknown` where the grammar has no word for it."""
    part = part_of(pattern)
    if part in {"vision", "audio", "projector"}:
        return part
    for role, words in _COMPILED:
        if words.search(pattern):
            # Some families call the gate matrix of a plain feed-forward layer what others call the router.
            return "feed-forward" if role == "router" and len(shape) != 2 else role
    return "unknown"
