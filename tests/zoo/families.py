"""The conformance field: every family of transformers with routed experts, recurrent or learned sparse attention.

    from zoo import families
    config = families.config("mixtral")      # what the config.json of a small checkpoint of that family says

No two sizes of a config agree, nor do the products that show in shapes (heads times head size, gate beside up), except
where the architecture ties them together. Every kind of layer of a family occurs; windows and the choices of sparse
attention are shorter than 24 tokens, so that they matter; groups of experts are more than one where a family has them.

SIZES holds a value for each field name; a family takes those that its config class declares and says what is special.
"""

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SEQUENCE = 24

# heads * head_dim = 128, kv_heads * head_dim = 32; experts fall into 3 groups of 5.
SIZES: dict[str, Any] = {
    "vocab_size": 199, "hidden_size": 80, "d_model": 80, "num_hidden_layers": 4, "num_layers": 4,
    "intermediate_size": 104, "dense_intermediate_size": 104, "ffn_hidden_size": 104,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16, "kv_channels": 16,
    "swa_num_attention_heads": 6, "swa_num_key_value_heads": 3, "swa_head_dim": 12,
    "max_position_embeddings": 256, "model_max_length": 256,
    # experts
    "moe_intermediate_size": 36, "expert_ffn_hidden_size": 36, "num_experts": 15, "num_local_experts": 15,
    "n_routed_experts": 15, "moe_num_experts": 15, "num_experts_per_tok": 4, "num_experts_per_token": 4,
    "moe_topk": 4, "moe_k": 4, "top_k_experts": 4, "n_group": 3, "num_expert_group": 3, "topk_group": 2,
    "n_shared_experts": 3, "num_shared_experts": 3, "moe_num_shared_experts": 3,
    "shared_expert_intermediate_size": 28, "shared_intermediate_size": 28, "shared_experts_intermediate_size": 28,
    "moe_shared_expert_intermediate_size": 28, "share_expert_dim": 28, "moe_hidden_size": 60, "moe_latent_size": 60,
    "router_hidden_size": 22, "zero_expert_num": 5, "first_k_dense_replace": 1, "num_dense_layers": 1,
    "moe_layer_start_index": 1,
    # latent and sparse attention
    "q_lora_rank": 44, "kv_lora_rank": 26, "qk_nope_head_dim": 20, "qk_rope_head_dim": 8, "v_head_dim": 14,
    "o_lora_rank": 18, "o_groups": 4, "gated_norm_rank": 6,
    "index_topk": 9, "index_head_dim": 24, "index_n_heads": 3, "sliding_window": 7, "sliding_window_size": 7,
    "attention_window_size": 7, "attention_chunk_size": 10,
    # recurrent mixers
    "linear_key_head_dim": 12, "linear_value_head_dim": 18, "linear_num_key_heads": 2, "linear_num_value_heads": 6,
    "linear_head_dim": 12, "linear_num_heads": 5, "mamba_n_heads": 10, "mamba_d_head": 16, "mamba_d_state": 11,
    "mamba_n_groups": 2, "mamba_ngroups": 2, "mamba_expand": 2, "mamba_chunk_size": 8, "chunk_size": 8, "block_size": 8,
    "mamba_dt_rank": 6, "state_size": 11, "time_step_rank": 6, "hc_mult": 4, "d_rel": 9, "rel_extent": 13,
    # no layers that predict further tokens
    "num_mtp_layers": 0, "num_nextn_predict_layers": 0,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip

# The towers that some of them see and hear with: carried through, so small is all they need to be.
TOWER: dict[str, Any] = {
    "depth": 1, "num_hidden_layers": 1, "n_layers": 1, "encoder_layers": 1, "hidden_size": 32, "d_model": 32,
    "intermediate_size": 48, "encoder_ffn_dim": 48, "num_heads": 2, "num_attention_heads": 2,
    "encoder_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16, "out_hidden_size": 80, "output_dim": 80,
    "text_hidden_size": 80, "vision_output_dim": 80, "projector_output_dim": 80, "adapter_out_dim": 80,
    "adapter_in_dim": 32, "adapter_input_size": 48, "projection_intermediate_size": 48, "projection_hidden_dim": 48,
    "projector_input_dim": 80, "num_position_embeddings": 16, "deepstack_visual_indexes": [0],
    "moe_intermediate_size": 20, "downsample_hidden_size": 16, "mlp_dim": 48,
}  # fmt: skip

FULL, SLIDING, LINEAR, INDEXED = "full_attention", "sliding_attention", "linear_attention", "indexed_attention"
DENSE_FIRST = ["dense", "sparse", "sparse", "sparse"]
WINDOWED = [SLIDING, FULL, SLIDING, FULL]
LATENT = {"num_key_value_heads": 8, "head_dim": None}  # a key for every query head; heads have two sizes of their own


def _rope(**more: Any) -> dict[str, Any]:
    return {"rope_type": "default", "rope_theta": 10000.0, **more}


@dataclass(frozen=True)
class Family:
    """architecture: the class that config.json names. text: fields of the language model, over SIZES; None leaves a
    field of SIZES out. towers: the other parts of a composite, by their config field. outer: fields beside them.
    model_type: if not the one of the class; text_type: the same of the nested part."""

    architecture: str
    text: Mapping[str, Any] = field(default_factory=dict)
    towers: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    outer: Mapping[str, Any] = field(default_factory=dict)
    model_type: str | None = None
    text_type: str | None = None


# Their attention reads a head size that their config class does not declare. Others do too and are left without one, as
# most real checkpoints are: there the head size is hidden // heads.
HEAD_SIZE_NOT_DECLARED = {
    "doge", "dots1", "ernie4_5_moe", "exaone_moe", "falcon_h1", "glm4_moe", "glm4v_moe", "granitemoe", "granitemoe_swa",
    "granitemoehybrid", "lfm2", "lfm2_moe", "olmo_hybrid", "qwen2_moe", "qwen3_moe", "qwen3_omni_moe",
}  # fmt: skip

_SAM = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "output_channels": 16, "image_size": 64,
        "mlp_dim": 32, "global_attn_indexes": [0], "downsample_channels": [16, 32]}  # fmt: skip
_ENCODER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2}

FAMILIES: dict[str, Family] = {
    "afmoe": Family("AfmoeForCausalLM", {"global_attn_every_n_layers": 3}),
    "aria": Family("AriaTextForCausalLM"),
    "axk1": Family("AXK1ForCausalLM", {**LATENT, "mlp_layer_types": DENSE_FIRST}),
    "axk2": Family("AXK2ForCausalLM", {**LATENT, "mlp_layer_types": DENSE_FIRST}),
    "bailing_hybrid": Family("BailingHybridForCausalLM", {**LATENT, "head_dim": 12, "layer_group_size": 2}),
    "bamba": Family("BambaForCausalLM", {"attn_layer_indices": [1, 3]}),
    "beam": Family("BeamForCausalLM", {"layer_types": WINDOWED, "mlp_layer_types": DENSE_FIRST}),
    "cohere2_moe": Family(
        "Cohere2MoeForCausalLM",
        {"layer_types": [FULL, SLIDING, SLIDING, FULL], "mlp_layer_types": DENSE_FIRST,
         "prefix_dense_intermediate_size": 92},
    ),
    "dbrx": Family(
        "DbrxForCausalLM",
        {
            "n_heads": 8, "n_layers": 2, "max_seq_len": 256, "hidden_size": None, "num_hidden_layers": None,
            "num_attention_heads": None, "max_position_embeddings": None,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0},
            "ffn_config": {"hidden_size": 80, "ffn_hidden_size": 36, "moe_num_experts": 15, "moe_top_k": 4},
        },
    ),
    "deepseek_ocr2": Family(
        "DeepseekOcr2ForConditionalGeneration",
        {"num_key_value_heads": 8, "head_dim": 10, "mlp_layer_types": DENSE_FIRST, "n_group": 1, "topk_group": 1},
        {"vision_config": {"sam_config": _SAM,
                           "encoder_config": {**_ENCODER, "num_key_value_heads": 2, "vocab_size": 64}}},
    ),
    "deepseek_v2": Family("DeepseekV2ForCausalLM", {**LATENT, "topk_method": "group_limited_greedy"}),
    "deepseek_v3": Family("DeepseekV3ForCausalLM", LATENT),
    "deepseek_v32": Family("DeepseekV32ForCausalLM", LATENT),
    "deepseek_v4": Family(
        "DeepseekV4ForCausalLM",
        {
            "num_key_value_heads": 1, "head_dim": 16, "partial_rotary_factor": 0.5, "num_hidden_layers": 5,
            "layer_types": [SLIDING, "compressed_sparse_attention", "heavily_compressed_attention",
                            "compressed_sparse_attention", "heavily_compressed_attention"],
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe", "moe"],
            "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 6},
            "index_topk": 5, "n_shared_experts": 1, "pad_token_id": None,
        },
    ),
    "doge": Family(
        "DogeForCausalLM", {"is_moe": True, "num_experts": 25, "keep_window_size": 9, "sliding_window": None}
    ),
    "dots1": Family("Dots1ForCausalLM"),
    "dots3_note": Family(
        "Dots3NoteForCausalLM",
        {
            "num_key_value_heads": 8, "layer_types": [SLIDING, INDEXED, SLIDING, INDEXED], "head_dim": 28,
            "mlp_layer_types": DENSE_FIRST, "swa_num_attention_heads": 6, "swa_num_key_value_heads": 6,
            "swa_head_dim": 16, "swa_qk_nope_head_dim": 10, "swa_q_lora_rank": 30, "swa_kv_lora_rank": 22,
            "swa_v_head_dim": 12,
        },
    ),
    "ernie4_5_moe": Family("Ernie4_5_MoeForCausalLM"),
    "ernie4_5_vl_moe": Family(
        "Ernie4_5_VLMoeForConditionalGeneration",
        {"moe_intermediate_size": [36, 20], "mlp_layer_types": DENSE_FIRST,
         "rope_parameters": _rope(mrope_section=[2, 2, 1])},
        {"vision_config": {}},
    ),
    "exaone_moe": Family("ExaoneMoeForCausalLM", {"sliding_window_pattern": 3}),
    "falcon_h1": Family("FalconH1ForCausalLM", {"mamba_d_ssm": 120, "mamba_d_head": 12}),
    "falcon_mamba": Family("FalconMambaForCausalLM"),
    "flex_olmo": Family("FlexOlmoForCausalLM"),
    "flint": Family("FlintForCausalLM", {"layer_types": [FULL, SLIDING, SLIDING, FULL], "mlp_only_layers": [1]}),
    "gemma4": Family("Gemma4ForCausalLM", {
        "enable_moe_block": True, "global_head_dim": 20, "layer_types": [SLIDING, SLIDING, FULL, FULL],
        "hidden_size_per_layer_input": 14, "vocab_size_per_layer_input": 199, "num_kv_shared_layers": 1,
        "use_double_wide_mlp": True,
    }),
    "glm4_moe": Family("Glm4MoeForCausalLM"),
    "glm4_moe_lite": Family("Glm4MoeLiteForCausalLM", {**LATENT, "mlp_layer_types": DENSE_FIRST}),
    "glm4v_moe": Family(
        "Glm4vMoeForConditionalGeneration",
        {"rope_parameters": _rope(partial_rotary_factor=0.5, mrope_section=[2, 1, 1])},
        {"vision_config": {}},
    ),
    "glm5_next": Family(
        "Glm5NextForConditionalGeneration",
        {
            "num_key_value_heads": 8, "qk_rope_head_dim": 0, "head_dim": None, "mlp_layer_types": DENSE_FIRST,
            "layer_types": [LINEAR, LINEAR, INDEXED, INDEXED], "indexer_types": ["full", "full", "full", "shared"],
            "index_topk": 8, "index_kpool": 2,
        },
        {"vision_config": {}},
    ),
    "glm_moe_dsa": Family(
        "GlmMoeDsaForCausalLM", {**LATENT, "indexer_types": ["full", "full", "shared", "shared"]}
    ),
    "gpt_oss": Family("GptOssForCausalLM", {"layer_types": WINDOWED, "intermediate_size": 36}),
    "granitemoe": Family("GraniteMoeForCausalLM", {"intermediate_size": 36, "embedding_multiplier": 3.0,
                         "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}),
    "granitemoe_swa": Family("GraniteMoeSWAForCausalLM", {"layer_types": WINDOWED, "intermediate_size": 36}),
    "granitemoehybrid": Family("GraniteMoeHybridForCausalLM", {"layer_types": [LINEAR, FULL, LINEAR, FULL],
                               "intermediate_size": 36}),
    "granitemoeshared": Family("GraniteMoeSharedForCausalLM", {"intermediate_size": 36}),
    "hunyuan_v1_moe": Family("HunYuanMoEV1ForCausalLM", {"intermediate_size": 36}),
    "hy_v3": Family("HYV3ForCausalLM", {"mlp_layer_types": DENSE_FIRST}),
    "hy_v4": Family("HYV4ForCausalLM", {**LATENT, "indexer_types": ["full", "full", "shared", "shared"],
                    "mlp_layer_types": DENSE_FIRST}),
    "hy_v4_vl": Family(
        "HYV4VLForConditionalGeneration",
        {**LATENT, "indexer_types": ["full", "full", "shared", "shared"], "mlp_layer_types": DENSE_FIRST,
         "rope_parameters": _rope(mrope_section=[2, 1, 1])},
        {"vision_config": {}},
    ),
    "inkling": Family("InklingForCausalLM", {"layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"],
                      "mlp_layer_types": DENSE_FIRST, "unpadded_vocab_size": 190}),
    "inkling2": Family("Inkling2ForCausalLM", {
        "layer_types": ["hybrid_sliding", "hybrid", "hybrid_sliding", "hybrid"], "unpadded_vocab_size": 190,
        "n_layers_per_attn_res_block": 2,
    }),
    "inkling2_loop": Family("Inkling2LoopForCausalLM", {
        "num_hidden_layers": 7, "layer_types": [*["hybrid_sliding", "hybrid"] * 3, "hybrid_sliding"],
        "unpadded_vocab_size": 190, "n_layers_per_attn_res_block": 2,
        "loop_layer_index_start": 2, "loop_layer_index_end": 6, "loop_num_passes": 3,
        "loop_gate_rank": 5,
    }),
    "jamba": Family("JambaForCausalLM", {"attn_layer_period": 4, "attn_layer_offset": 2, "expert_layer_period": 2,
                    "expert_layer_offset": 1, "use_mamba_kernels": False}),
    "jetmoe": Family("JetMoeForCausalLM", {"intermediate_size": 36}),
    "kimi_linear": Family("KimiLinearForCausalLM", {**LATENT, "layer_types": [LINEAR, LINEAR, FULL, FULL],
                          "mlp_layer_types": DENSE_FIRST}),
    "kolibri1": Family("Kolibri1ForCausalLM", {"layer_types": WINDOWED}),
    "laguna": Family("LagunaForCausalLM", {"layer_types": WINDOWED, "mlp_layer_types": DENSE_FIRST,
                     "num_attention_heads_per_layer": [6, 8, 6, 8]}),
    "lara_mini": Family("LaraMiniForCausalLM", {"num_hidden_layers": 5}),
    "lfm2": Family("Lfm2ForCausalLM", {"layer_types": ["conv", FULL, "conv", "conv"],
                   "block_auto_adjust_ff_dim": False}),
    "lfm2_moe": Family("Lfm2MoeForCausalLM", {"layer_types": ["conv", FULL, "conv", "conv"]}),
    "lfm3": Family("Lfm3ForCausalLM", {"layer_types": ["conv", FULL, "conv", SLIDING]}),
    "lfm3_vl": Family("Lfm3VlForConditionalGeneration", {"layer_types": ["conv", FULL, "conv", SLIDING]},
                      {"vision_config": {}}, text_type="lfm3"),
    "llama4": Family("Llama4ForCausalLM", {
        "intermediate_size": 36, "intermediate_size_mlp": 104, "interleave_moe_layer_step": 2,
        "no_rope_layers": [1, 1, 1, 0],
    }),
    "longcat_flash": Family("LongcatFlashForCausalLM", {
        **LATENT, "num_layers": 2, "num_hidden_layers": None, "head_dim": 8, "intermediate_size": None,
        "moe_intermediate_size": None, "num_experts_per_tok": None,
    }),
    "mamba": Family("MambaForCausalLM"),
    "mamba2": Family("Mamba2ForCausalLM", {"num_heads": 10, "n_groups": 2, "expand": 2}),
    "mellum": Family("MellumForCausalLM", {"layer_types": WINDOWED, "mlp_layer_types": DENSE_FIRST}),
    "mimo_v2_flash": Family("MiMoV2FlashForCausalLM", {
        "layer_types": WINDOWED, "mlp_layer_types": DENSE_FIRST,
        "rope_parameters": {FULL: _rope(partial_rotary_factor=0.5), SLIDING: _rope(partial_rotary_factor=0.5)},
    }),
    "minimax": Family("MiniMaxForCausalLM", {
        "intermediate_size": 36, "layer_types": [FULL, LINEAR, FULL, LINEAR], "full_attn_alpha_factor": 1.5,
        "linear_attn_beta_factor": 0.7, "mlp_alpha_factor": 1.3, "sliding_window": None,
    }),
    "minimax_m2": Family("MiniMaxM2ForCausalLM", {"intermediate_size": 36, "rotary_dim": 8}),
    "minimax_m3_vl": Family("MiniMaxM3VLForCausalLM", {
        "layer_types": [FULL, "minimax_m3_sparse", "minimax_m3_sparse", "minimax_m3_sparse"],
        "mlp_layer_types": DENSE_FIRST, "intermediate_size": 36, "index_n_heads": 2, "index_block_size": 4,
        "index_topk_blocks": 3, "index_local_blocks": 1, "rotary_dim": 8, "dense_intermediate_size": 104,
    }),
    "mistral4": Family("Mistral4ForCausalLM", LATENT),
    "mistral_large4": Family(
        "MistralLarge4ForConditionalGeneration",
        {**LATENT, "kv_source_layers": [0, 1, 1, 3], "indexer_types": ["full", "full", "shared", "full"]},
        {"vision_config": {"model_type": "pixtral", **_ENCODER, "head_dim": 16, "image_size": 28, "patch_size": 14}},
    ),
    "mixtral": Family("MixtralForCausalLM", {"intermediate_size": 36, "sliding_window": 7}),
    "muse_spark": Family(
        "MuseSparkForConditionalGeneration",
        {"layer_types": WINDOWED, "mlp_layer_types": DENSE_FIRST},
        {
            "vision_config": _ENCODER,
            "audio_config": {"num_hidden_layers": 2, "patch_sizes": [4, 4], "hidden_sizes": [16, 32], "depths": [1, 1],
                             "out_hidden_size": 80},
        },
        {"out_hidden_size": 80, "projector_hidden_size": 32},
    ),
    "nemotron_h": Family("NemotronHForCausalLM", {
        "num_hidden_layers": None, "layers_block_type": ["mamba", "moe", "attention", "mlp"], "mamba_num_heads": 10,
        "mamba_head_dim": 12, "ssm_state_size": 11, "n_groups": 2, "use_mamba_kernels": False,
    }),
    "nllb_moe": Family("NllbMoeForConditionalGeneration", {
        "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 104, "decoder_ffn_dim": 92,
        "encoder_attention_heads": 8, "decoder_attention_heads": 8, "encoder_sparse_step": 2, "decoder_sparse_step": 2,
        "expert_capacity": 64, "decoder_start_token_id": 2, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0,
        "dropout": 0.0, "attention_dropout": 0.0, "moe_token_dropout": 0.0, "hidden_size": None,
        "num_hidden_layers": None, "num_attention_heads": None,
    }),
    "olmo_hybrid": Family("OlmoHybridForCausalLM", {"layer_types": [LINEAR, LINEAR, FULL, FULL]}),
    "olmoe": Family("OlmoeForCausalLM", {"intermediate_size": 36}),
    "phimoe": Family("PhimoeForCausalLM", {"intermediate_size": 36, "num_experts_per_tok": 2}),
    "qwen2_moe": Family("Qwen2MoeForCausalLM", {"mlp_only_layers": [1], "use_sliding_window": True}),
    "qwen3_5": Family("Qwen3_5ForCausalLM", {"layer_types": [LINEAR, LINEAR, LINEAR, FULL]}),
    "qwen3_5_moe": Family("Qwen3_5MoeForCausalLM", {"layer_types": [LINEAR, LINEAR, LINEAR, FULL]}),
    "qwen3_moe": Family("Qwen3MoeForCausalLM", {"mlp_only_layers": [1]}),
    "qwen3_next": Family("Qwen3NextForCausalLM", {"layer_types": [LINEAR, LINEAR, LINEAR, FULL],
                         "mlp_only_layers": [0]}),
    "qwen3_omni_moe": Family(
        "Qwen3OmniMoeThinkerForConditionalGeneration",
        {"mlp_only_layers": [1], "rope_parameters": _rope(mrope_section=[3, 3, 2]), "sliding_window": None},
        {"vision_config": {}, "audio_config": {"num_mel_bins": 16}},
    ),
    "qwen3_vl_moe": Family(
        "Qwen3VLMoeForConditionalGeneration",
        {"mlp_only_layers": [1], "rope_parameters": _rope(mrope_section=[3, 3, 2])},
        {"vision_config": {}},
    ),
    "qwen4_exp": Family("Qwen4ExpForCausalLM", {
        "layer_types": [LINEAR, INDEXED, LINEAR, INDEXED], "hc_count": 4, "hc_lowrank": 6, "ple_layer_ids": [1],
        "ple_embed_dim": 16, "ngram_vocab_size_base": 64, "heads_per_ngram": 2, "split_ngram_parts": 2,
        "make_ngram_vocab_size_divisible_by": 8, "indexer_kv_heads": 1, "indexer_n_heads": 3, "indexer_head_dim": 24,
        "indexer_budget": 8, "indexer_compress_ratio": 2,
    }),
    "recurrent_gemma": Family("RecurrentGemmaForCausalLM", {"lru_width": 96, "num_key_value_heads": 1,
                              "head_dim": None}),
    "rwkv": Family("RwkvForCausalLM", {"context_length": 256, "attention_hidden_size": 64, "intermediate_size": 104,
                   "max_position_embeddings": None}),
    "solar_open": Family("SolarOpenForCausalLM"),
    "step3p7": Family(
        "Step3p7ForConditionalGeneration",
        {"layer_types": [FULL, SLIDING, SLIDING, FULL], "mlp_layer_types": DENSE_FIRST, "num_local_experts": None,
         "num_sliding_attention_heads": 6, "swiglu_limits": [None, None, 0.7, 0.9],
         "swiglu_limits_shared": [None, None, None, 0.8]},
        {"vision_config": {}},
    ),
    "switch_transformers": Family("SwitchTransformersForConditionalGeneration", {
        "d_kv": 12, "d_ff": 104, "num_layers": 2, "num_sparse_encoder_layers": 1, "num_decoder_layers": 2,
        "num_sparse_decoder_layers": 1, "num_heads": 8, "expert_capacity": 64, "decoder_start_token_id": 0,
        "hidden_size": None, "num_hidden_layers": None, "num_attention_heads": None, "num_experts_per_tok": None,
        "dropout_rate": 0.0,
    }),
    "unlimited_ocr": Family(
        "UnlimitedOcrForConditionalGeneration",
        {"head_dim": 10, "num_key_value_heads": 8, "mlp_layer_types": DENSE_FIRST, "n_group": 1, "topk_group": 1},
        {"vision_config": {"sam_config": _SAM, "encoder_config": {**_ENCODER, "image_size": 28}}},
    ),
    "xlstm": Family("xLSTMForCausalLM", {"num_heads": 4, "embedding_dim": None, "num_blocks": None,
                    "ffn_round_up_to_multiple_of": 8, "hidden_size": 80}),
    "zamba": Family("ZambaForCausalLM", {
        "num_hidden_layers": 5, "num_key_value_heads": 8, "n_mamba_heads": 2, "attention_hidden_size": 160,
        "attention_head_dim": 20, "head_dim": None, "use_mamba_kernels": False,
        "layers_block_type": [LINEAR, LINEAR, "hybrid", LINEAR, "hybrid"],
    }),
    "zamba2": Family("Zamba2ForCausalLM", {
        "num_hidden_layers": 5, "num_key_value_heads": 8, "n_mamba_heads": 10, "head_dim": None,
        "layers_block_type": [LINEAR, "hybrid", LINEAR, "hybrid", "hybrid"], "adapter_rank": 6, "num_mem_blocks": 2,
        "use_mamba_kernels": False, "use_shared_attention_adapter": True,
    }),
    "zaya": Family("ZayaForCausalLM", {"layer_types": ["hybrid"] * 4, "num_experts_per_tok": 1}),
    "sarvam_mla": Family("DeepseekV3ForCausalLM", LATENT, model_type="sarvam_mla"),
    "sarvam_moe": Family("Glm4MoeForCausalLM", model_type="sarvam_moe"),
    "kimi_k25": Family("Kimi_K25ForConditionalGeneration", LATENT, {"vision_config": {}},
                       {"projection_hidden_size": 128}, text_type="deepseek_v3"),
}  # fmt: skip


def config(family: str) -> dict[str, Any]:
    """A config.json: architectures, model_type, sizes; nested where the family's checkpoints nest it."""
    entry = FAMILIES[family]
    cls = _config_class(family, entry)
    head = {"architectures": [entry.architecture], "model_type": entry.model_type or cls.model_type, "dtype": "float32"}
    special = {**({"head_dim": 16} if family in HEAD_SIZE_NOT_DECLARED else {}), **entry.text}
    if not entry.towers:
        return {**head, **_fields(cls, special, SIZES)}
    text = _part_class(cls, "text_config", entry.text_type)
    towers = {}
    for name, own in entry.towers.items():
        part = _part_class(cls, name, own.get("model_type"))
        towers[name] = {"model_type": part.model_type, **_fields(part, own, TOWER)}
    nested = {"model_type": text.model_type, **_fields(text, special, SIZES)}
    return {**head, **entry.outer, "text_config": nested, **towers}


@functools.cache
def model_class(family: str) -> type:
    """The class that `architectures` names. Not every one is exported at the top of transformers."""
    import transformers

    name = FAMILIES[family].architecture
    found = getattr(transformers, name, None)
    return found or getattr(importlib.import_module(f"transformers.models.{family}.modeling_{family}"), name)


def _config_class(family: str, entry: Family) -> Any:
    from transformers import CONFIG_MAPPING

    return CONFIG_MAPPING[entry.model_type] if entry.model_type else model_class(family).config_class  # type: ignore[attr-defined]


def _part_class(cls: Any, name: str, model_type: str | None) -> Any:
    """The config class of a nested part: the one that the outer class declares, unless it leaves that open."""
    from transformers import CONFIG_MAPPING

    if model_type:
        return CONFIG_MAPPING[model_type]
    return cls.sub_configs[name]


def _fields(cls: Any, special: Mapping[str, Any], sizes: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the sizes that the class declares, with what is special over them; an alias and its target once."""
    declared = {name for base in cls.__mro__ for name in getattr(base, "__annotations__", {})}
    aliases = getattr(cls, "attribute_map", None) or {}
    taken = {name: value for name, value in sizes.items() if name in declared or name in aliases}
    taken = {
        name: value for name, value in taken.items() if aliases.get(name, name) == name or aliases[name] not in taken
    }
    taken = {**taken, **special}
    return {name: value for name, value in taken.items() if value is not None}
