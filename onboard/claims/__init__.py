"""What a config states and no code reads: claims of a checkpoint about its model, held against what was proven.

A field that the reference does not read changes nothing there, and is still a statement: that routers score by a
sigmoid, that every fourth layer attends. Each meaning that is known here has one function, which looks for it in the
proven blocks and says what it found. True claims are recorded with what confirms them; a false one means that either
the config or the reference is wrong, and stops onboarding; a size that is not the tensors' is only reported, for shapes
have decided it. A field whose meaning is not known stays unread.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal

from dayzero.onboard.claims import attention, feed_forward, layers, routing, sizes
from dayzero.onboard.claims.shown import Shown, Verdict
from dayzero.onboard.config_fields import SIZES
from dayzero.runtime.record import Record
from dayzero.runtime.spec import ModelSpec

Meaning = Callable[[Any, Shown], Verdict | None]

_SHOWN = 80  # characters of a value in a message


class Claim(Record):
    """field states a value, as JSON. verdict: confirmed by the proof or the shapes; contradicted by the proof; without
    effect, contradicted by the reference itself, whose class knows the field and ignores it; a size that is not the
    tensors'; or beside the point, as nothing is computed with it. proven: what shows that."""

    field: str
    states: str
    verdict: Literal["confirmed", "contradicted", "without effect", "not the tensors'", "beside the point"]
    proven: str


# Names of fields that mean the same -> what checks them.
_CHECKED: tuple[tuple[str, Meaning], ...] = (
    # Routers and experts.
    ("scoring_func score_func score_function moe_router_activation_func moe_router_score_function", routing.score),
    ("topk_method", routing.method),
    ("use_grouped_topk", routing.grouped),
    ("n_group num_expert_group", routing.groups),
    ("topk_group", routing.kept_groups),
    ("use_routing_bias moe_router_enable_expert_bias use_expert_bias", routing.bias),
    ("norm_topk_prob moe_renormalize route_norm", routing.renormalised),
    ("routed_scaling_factor route_scale moe_router_topk_scaling_factor", routing.scale),
    ("moe_router_dtype router_dtype", routing.dtype),
    (" ".join(SIZES["top_k"]), routing.top_k),
    (" ".join(SIZES["experts"]), routing.experts),
    (" ".join(SIZES["expert_width"]), routing.width),
    (" ".join(SIZES["shared_experts"]), routing.shared_number),
    (" ".join((*SIZES["shared_width"], "shared_intermediate_size")), routing.shared_width),
    ("feed_forward_proj", feed_forward.projection),
    # Which layers have experts.
    ("moe_layer_freq", routing.frequency),
    ("first_k_dense_replace num_dense_layers moe_num_dense_layers", routing.leading_dense),
    ("decoder_sparse_step interleave_moe_layer_step", routing.step),
    ("mlp_only_layers", routing.dense_numbers),
    ("num_hash_layers", routing.leading_hashed),
    # Which layers attend, and to what.
    ("layer_types layers_block_type mlp_layer_types", layers.words),
    ("hybrid_override_pattern", layers.letters),
    ("full_attention_interval", layers.interval),
    ("attn_type_list", layers.attend_flags),
    ("hybrid_layer_pattern", layers.window_flags),
    ("full_attn_layers linear_attn_config.full_attn_layers", layers.attending_numbers),
    ("kda_layers linear_attn_config.kda_layers", layers.recurring_numbers),
    (" ".join(name for name in SIZES["window"] if name != "sliding_window_size"), layers.window),
    ("sliding_window_size", layers.window_before),
    ("use_sliding_window", layers.windows_used),
    ("max_window_layers", layers.first_windowed),
    ("sliding_window_pattern", layers.window_interval),
    ("attention_chunk_size", layers.chunk),
    ("compress_ratios", layers.compression),
    ("index_topk_freq index_skip_topk_offset", attention.shared_index),
    ("index_topk_pattern indexer_types", attention.index_pattern),
    ("index_topk", attention.indexed_tokens),
    # Inside attention and recurrences.
    ("attn_output_gate mla_use_output_gate use_output_gate", attention.gate),
    ("use_full_rank_gate linear_attn_config.use_full_rank_gate", attention.full_rank_gate),
    ("gate_lower_bound linear_attn_config.gate_lower_bound", attention.gate_bound),
    ("use_qk_norm qk_norm qk_layernorm use_qk_layernorm", attention.query_key_norm),
    ("qk_norm_type", attention.query_key_norm_over),
    ("add_full_attention_sink_bias", attention.full_sinks),
    ("add_swa_attention_sink_bias", attention.window_sinks),
    ("mamba_ssm_dtype", attention.state_dtype),
    # Positions and norms.
    ("rope_interleave rope_interleaved rope_traditional", attention.interleaved),
    ("indexer_rope_interleave", attention.indexer_interleaved),
    ("mla_use_nope", attention.no_positions),
    ("no_rope_layers", attention.position_flags),
    ("no_rope_layer_interval", attention.position_interval),
    ("rope_theta global_rope_theta", attention.base),
    ("swa_rope_theta local_rope_theta rope_local_base_freq", attention.window_base),
    ("compress_rope_theta", attention.compressed_base),
    ("qk_rope_head_dim rotary_dim", attention.turned_channels),
    ("partial_rotary_factor rotary_pct", attention.turned_part),
    ("initial_context_length original_max_position_embeddings", attention.original_length),
    (
        "rms_norm_eps norm_eps norm_epsilon layernorm_epsilon layer_norm_epsilon layer_norm_eps rms_norm_epsilon",
        attention.norm_eps,
    ),
    # Sizes of tensors.
    (" ".join(SIZES["layers"]), sizes.layer_count),
    (" ".join(SIZES["width"]), sizes.dense_width),
    (" ".join(SIZES["heads"]), sizes.heads),
    (" ".join(SIZES["kv_heads"]), sizes.kv_heads),
    (" ".join(SIZES["head_dim"]), sizes.head_dim),
    ("v_head_dim", sizes.value_dim),
    ("swa_num_attention_heads", sizes.window_heads),
    ("swa_num_key_value_heads", sizes.window_kv_heads),
    ("swa_head_dim", sizes.window_head_dim),
    ("swa_v_head_dim", sizes.window_value_dim),
    ("num_global_key_value_heads", sizes.global_kv_heads),
    ("global_head_dim", sizes.global_head_dim),
    ("qk_head_dim", sizes.query_key_dim),
    ("qk_nope_head_dim", sizes.nope_dim),
    ("q_lora_rank", sizes.query_rank),
    ("kv_lora_rank", sizes.kv_rank),
    ("index_n_heads", sizes.index_heads),
    ("index_head_dim", sizes.index_dim),
    ("linear_num_value_heads linear_attn_config.num_heads", sizes.linear_heads),
    ("linear_num_key_heads", sizes.linear_key_heads),
    ("linear_key_head_dim linear_attn_config.head_dim", sizes.linear_key_dim),
    ("linear_value_head_dim", sizes.linear_value_dim),
    ("linear_conv_kernel_dim linear_attn_config.short_conv_kernel_size", sizes.convolution),
)

# Why nothing that is proven depends on a field -> the fields.
_BESIDE: tuple[tuple[str, str], ...] = (
    (
        "layers that predict further tokens are carried through as they are",
        "num_nextn_predict_layers mtp_num_hidden_layers num_mtp_modules num_mtp_layers mtp_layers use_mtp "
        "mtp_transformer_layers mtp_use_dedicated_embeddings mtp_hybrid_override_pattern mtp_layers_block_type "
        "index_share_for_mtp_iteration mtp_loss_scaling_factor",
    ),
    (
        "a term of a training loss, which is the trainer's own setting",
        "aux_loss_alpha seq_aux aux_loss_coef router_aux_loss_coef moe_aux_loss_coeff moe_router_aux_loss_coef "
        "router_z_loss_coef z_loss_coef moe_z_loss_coeff use_aux_loss_free",
    ),
    ("storage; the headers say it for every tensor", "expert_dtype"),
    ("the precision of a cache, for generation only", "mamba_ssm_cache_dtype"),
)

MEANINGS: dict[str, Meaning] = {name: meaning for names, meaning in _CHECKED for name in names.split()}
BESIDE: dict[str, str] = {name: why for why, names in _BESIDE for name in names.split()}
_NESTED = {name.split(".")[0] for name in MEANINGS if "." in name}


def check_claims(
    fields: Iterable[str], config: Mapping[str, Any], spec: ModelSpec, defaults: Mapping[str, Any] | None = None
) -> tuple[list[Claim], list[str]]:
    """(claims, fields that stay unread) of the given fields of `config`, the config of the text decoder. defaults: what
    its class adds.

    Of a field that holds fields of its own each is a claim, by its full name.
    """
    shown, claims, unread = Shown(spec, config, defaults), [], []
    for field in fields:
        made = {name: _claim(name, value, shown) for name, value in _statements(field, config[field])}
        claims += [claim for claim in made.values() if claim is not None]
        if None in made.values():
            unread.append(field)
    return claims, unread


def check_idle(
    fields: Iterable[str], config: Mapping[str, Any], spec: ModelSpec, defaults: Mapping[str, Any] | None = None
) -> list[Claim]:
    """The claims of fields that the reference's class knows and that have no effect there. What is false among them was
    decided by the reference's authors: it is reported, and stops nothing."""
    claims, _ = check_claims(fields, config, spec, defaults)
    return [
        claim.model_copy(update={"verdict": "without effect"}) if claim.verdict == "contradicted" else claim
        for claim in claims
    ]


def _statements(field: str, value: Any) -> Iterator[tuple[str, Any]]:
    if field in _NESTED and isinstance(value, Mapping):
        yield from ((f"{field}.{name}", held) for name, held in value.items())
    else:
        yield field, value


def _claim(field: str, value: Any, shown: Shown) -> Claim | None:
    """The claim with its verdict; None where its meaning is not known, or nothing shows it."""
    if field in BESIDE:
        return Claim(field=field, states=_stated(value), verdict="beside the point", proven=BESIDE[field])
    verdict = MEANINGS[field](value, shown) if field in MEANINGS else None
    if value is None and field in MEANINGS and (verdict is None or (not verdict.holds and verdict.by == "tensors")):
        verdict = Verdict(True, "null states nothing", "reason")
    if verdict is None:
        return None
    if verdict.holds:
        what = "beside the point" if verdict.by == "reason" else "confirmed"
    else:
        what = "not the tensors'" if verdict.by == "tensors" else "contradicted"
    return Claim(field=field, states=_stated(value), verdict=what, proven=verdict.proven)


def _stated(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
