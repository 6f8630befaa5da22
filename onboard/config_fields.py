"""What config fields mean, by synonym: the few that have to be known by name, for lack of other evidence.

Sizes are set to other values when a config is shrunk; the irrelevant ones change no arithmetic of a training step.
"""

from collections.abc import Mapping
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
    "top_k": ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k", "top_k_experts"),
    "shared_experts": ("n_shared_experts", "num_shared_experts"),
    "window": ("sliding_window", "sliding_window_size", "attention_window_size", "window_size"),
}

# Field -> why it changes nothing that onboarding has to explain.
IRRELEVANT: dict[str, str] = {
    "architectures": "names the class, proves nothing",
    "auto_map": "names remote code, which is not run",
    "model_type": "a name, proves nothing",
    "dtype": "storage; the headers say it for every tensor",
    "torch_dtype": "storage; the headers say it for every tensor",
    "transformers_version": "who wrote the file",
    "_name_or_path": "who wrote the file",
    "use_cache": "generation only",
    "bos_token_id": "tokenisation",
    "eos_token_id": "tokenisation",
    "pad_token_id": "tokenisation",
    "decoder_start_token_id": "tokenisation",
    "initializer_range": "initial values; read for training from random weights",
    "max_position_embeddings": "a limit on lengths; rotary scalings that depend on it read it",
    "output_router_logits": "extra outputs",
    "output_attentions": "extra outputs",
    "output_hidden_states": "extra outputs",
    "router_aux_loss_coef": "the auxiliary loss is the trainer's own setting",
    "pretraining_tp": "a split of the same products",
    "return_dict": "form of the output",
    "use_return_dict": "form of the output",
    "tie_word_embeddings": "read by onboarding itself, together with the tensors that are present",
    "chunk_size_feed_forward": "a split of the same products",
    "is_encoder_decoder": "the form of the model, seen in its structure",
    "problem_type": "classification heads",
    "id2label": "classification heads",
    "label2id": "classification heads",
}

# Older spelling -> the field that transformers turns it into.
RENAMED: dict[str, str] = {
    "rope_theta": "rope_parameters",
    "rope_scaling": "rope_parameters",
    "partial_rotary_factor": "rope_parameters",
}


def field_of(config: Mapping[str, Any], meaning: str) -> str | None:
    """The name under which this config holds a size, None if it does not."""
    return next((name for name in SIZES[meaning] if config.get(name) is not None), None)


def size_of(config: Mapping[str, Any], meaning: str) -> int | None:
    """The size itself."""
    name = field_of(config, meaning)
    value = config[name] if name is not None else None
    return value if isinstance(value, int) and not isinstance(value, bool) else None
