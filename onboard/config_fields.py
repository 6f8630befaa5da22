"""What config fields mean, by synonym: the few that have to be known by name, for lack of other evidence.

Sizes are set to other values when a config is shrunk; the irrelevant ones change no arithmetic of a training step;
those of the maths change it in a way that no tensor shows, so that a proof has to read them.
"""

from collections.abc import Iterator, Mapping
from typing import Any

# Meaning -> the names that configs use for it, commonest first.
SIZES: dict[str, tuple[str, ...]] = {
    "hidden": ("hidden_size", "n_embd", "d_model", "dim"),
    "layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "heads": ("num_attention_heads", "n_head", "num_heads", "n_heads"),
    "kv_heads": ("num_key_value_heads", "num_kv_heads", "n_head_kv"),
    "head_dim": ("head_dim", "attention_head_dim"),
    "vocabulary": ("vocab_size",),
    "width": ("intermediate_size", "ffn_dim", "n_inner", "ffn_hidden_size"),
    "expert_width": ("moe_intermediate_size", "expert_ffn_hidden_size", "moe_ffn_hidden_size"),
    "shared_width": ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "top_k": (
        "num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts", "experts_per_token",
    ),
    "shared_experts": ("n_shared_experts", "num_shared_experts"),
    "window": ("sliding_window", "sliding_window_size", "attention_window_size", "window_size"),
}  # fmt: skip

# Reason -> fields that change nothing that onboarding has to explain.
_IRRELEVANT: dict[str, str] = {
    "a name, proves nothing": "architectures model_type",
    "names remote code, which is not run": "auto_map",
    "storage; the headers say it for every tensor": "dtype torch_dtype",
    "who wrote the file": "transformers_version _name_or_path",
    "tokenisation": "bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id tokenizer_class "
    "image_token_id video_token_id image_token_index audio_token_id vision_start_token_id vision_end_token_id "
    "media_placeholder_token_id image_placeholder ignore_index",
    "generation only": "use_cache do_sample temperature top_p typical_p num_beams num_beam_groups "
    "num_return_sequences max_length min_length early_stopping length_penalty repetition_penalty diversity_penalty "
    "no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids suppress_tokens begin_suppress_tokens "
    "forced_bos_token_id forced_eos_token_id exponential_decay_length_penalty remove_invalid_values output_scores "
    "return_dict_in_generate prefix",
    "initial values; read for training from random weights": "initializer_range",
    "a limit on lengths; rotary scalings that depend on it read it": "max_position_embeddings model_max_length",
    "extra outputs": "output_router_logits output_attentions output_hidden_states",
    "the auxiliary loss is the trainer's own setting": "router_aux_loss_coef",
    "a split of the same products": "pretraining_tp chunk_size_feed_forward ep_size",
    "form of the output": "return_dict use_return_dict torchscript tf_legacy_loss",
    "read by onboarding itself, together with the tensors that are present": "tie_word_embeddings",
    "the form of the model, seen in its structure": "is_encoder_decoder is_decoder add_cross_attention "
    "cross_attention_hidden_size tie_encoder_decoder pruned_heads",
    "classification heads": "problem_type id2label label2id finetuning_task task_specific_params",
    "an older spelling of dtype": "use_bfloat16",
    "further-token layers; whether there are any is seen in the tensors": "num_nextn_predict_layers num_mtp_layers",
}
IRRELEVANT: dict[str, str] = {name: why for why, names in _IRRELEVANT.items() for name in names.split()}

# What changes -> fields that change it and that no tensor shows.
_MATHS: dict[str, str] = {
    "activation": "hidden_act hidden_activation activation_situ_beta activation_situ_linear_beta swiglu_limit "
    "swiglu_alpha mlp_hidden_act expert_dtype",
    "bias terms": "attention_bias mlp_bias use_bias",
    "norms": "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon hc_eps qk_norm_type use_qk_norm "
    "latent_moe_use_norm zero_centered_gamma",
    "router": "norm_topk_prob scoring_func routed_scaling_factor n_group topk_group topk_method num_expert_group "
    "moe_renormalize moe_router_activation_func use_grouped_topk router_jitter_noise moe_router_dtype "
    "use_routing_bias moe_router_enable_expert_bias",
    "rotary positions": "rope_theta rope_scaling rope_parameters partial_rotary_factor rotary_dim rope_interleave "
    "indexer_rope_interleave compress_rope_theta rope_traditional mla_use_nope initial_context_length "
    "qk_rope_head_dim qk_nope_head_dim qk_head_dim",
    "attention": "attention_dropout clip_qkv attn_logit_softcapping query_pre_attn_scalar attention_multiplier "
    "mla_use_output_gate attn_output_gate v_head_dim q_lora_rank kv_lora_rank o_groups o_lora_rank index_topk "
    "index_head_dim index_n_heads index_topk_freq index_skip_topk_offset index_topk_pattern "
    "index_share_for_mtp_iteration head_dim attention_head_dim use_sliding_window max_window_layers",
    "linear attention": "gate_lower_bound short_conv_kernel_size use_full_rank_gate num_heads linear_attn_config "
    "linear_conv_kernel_dim linear_key_head_dim linear_num_key_heads linear_num_value_heads linear_value_head_dim "
    "mamba_ssm_dtype",
    "residual streams": "attn_res_block_size hc_mult hc_sinkhorn_iters residual_multiplier",
    "feed-forward": "routed_expert_hidden_size shared_intermediate_size",
    "output": "final_logit_softcapping logits_scaling embedding_multiplier",
    "further-token layers": "use_mtp mtp_transformer_layers mtp_use_dedicated_embeddings",
}  # fmt: skip
MATHS: dict[str, str] = {name: what for what, names in _MATHS.items() for name in names.split()}

# Older spelling -> the field that transformers turns it into.
RENAMED: dict[str, str] = {
    "rope_theta": "rope_parameters",
    "rope_scaling": "rope_parameters",
    "partial_rotary_factor": "rope_parameters",
}

_OTHER_MODELS = ("vision", "visual", "audio", "speech", "image", "video", "talker", "vit", "quantization")


def field_of(config: Mapping[str, Any], meaning: str) -> str | None:
    """The name under which this config holds a size, None if it does not."""
    return next((name for name in SIZES[meaning] if config.get(name) is not None), None)


def size_of(config: Mapping[str, Any], meaning: str) -> int | None:
    """The size itself."""
    name = field_of(config, meaning)
    value = config[name] if name is not None else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None


class ConfigView:
    """A config as classification reads it: the language model's own part first, then the outer one. It remembers what
    was read.

    text: the part that describes the language model. prefix: its name with a dot, "" where it is the whole.
    """

    def __init__(self, config: Mapping[str, Any]):
        self.outer = config
        nested = [
            name
            for name, value in config.items()
            if isinstance(value, Mapping) and field_of(value, "layers") and not _of_another_model(name)
        ]
        self.prefix = f"{nested[0]}." if nested and not field_of(config, "layers") else ""
        self.text: Mapping[str, Any] = config[nested[0]] if self.prefix else config
        self.used: set[str] = set()

    def get(self, name: str) -> Any:
        """A field of the text part, else of the outer one; None if neither has it."""
        self.used.add(name)
        return self.text[name] if name in self.text else self.outer.get(name)

    def size(self, meaning: str) -> int | None:
        """A size by its meaning."""
        name = field_of(self.text, meaning)
        if name is not None:
            self.used.add(name)
        return size_of(self.text, meaning)

    def said(self, meaning: str) -> str:
        """`text_config.num_experts=896`, for messages."""
        name = field_of(self.text, meaning)
        return f"{self.prefix}{name}={self.text[name]}" if name else f"no {SIZES[meaning][0]}"

    def fields(self) -> Iterator[tuple[str, str, Any]]:
        """(full name, last part of it, value) of every plain field that is the language model's business."""
        yield from _flat(self.text, self.prefix)
        if self.prefix:
            yield from ((name, last, value) for name, last, value in _flat(self.outer, "") if name == last)

    def unread(self) -> tuple[list[str], dict[str, str]]:
        """(fields that nobody knows, fields of the maths that classification did not use -> what they change)."""
        known = {name for names in SIZES.values() for name in names}
        unknown, maths = [], {}
        for full, last, value in self.fields():
            parts = set(full.split("."))
            if parts & self.used or last in IRRELEVANT or value in (None, [], {}):
                continue
            if (last, value) == ("top_k", 50):  # of sampling, as every old config.json has it; not a router's
                continue
            changes = next((MATHS[part] for part in full.split(".") if part in MATHS), None)
            if changes is not None:
                maths[full] = changes
            elif last not in known and last not in RENAMED:
                unknown.append(full)
        return sorted(unknown), dict(sorted(maths.items()))


def _of_another_model(name: str) -> bool:
    return any(word in name.lower() for word in _OTHER_MODELS)


def _flat(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, str, Any]]:
    for name, value in config.items():
        if isinstance(value, Mapping):
            if not _of_another_model(name) and name not in IRRELEVANT:
                yield from _flat(value, f"{prefix}{name}.")
        elif not _of_another_model(name):
            yield f"{prefix}{name}", name, value
