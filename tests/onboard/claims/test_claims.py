"""Every meaning that a claim can have, once true and once false of a model that is written by hand."""

import json
import re
import shutil

import onboarded
import pytest

from dayzero.onboard.align import Alignment
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.claims import BESIDE, MEANINGS, check_claims, check_idle
from dayzero.onboard.prove.proven import NotProven
from dayzero.onboard.report.report import Findings, render_html, render_markdown
from dayzero.onboard.specify_checkpoint import specify_checkpoint
from dayzero.runtime.plan import make_plan
from dayzero.runtime.spec import AgainSpec, BlockSpec, CheckpointId, LayerKind, LayerRun, ModelSpec, PartSpec, StepSpec

IDENTITY = CheckpointId(architecture="x", config_sha256="0", headers_sha256="0", tensors=1, bytes=1, dtypes={})


def block(name, **arguments):
    return BlockSpec(block=name, arguments=arguments)


NORM = block("RMSNorm", width=8, eps=1e-6)
DENSE = block("GatedFeedForward", hidden=8, width=20, act="silu")


def attention(**more):
    return block(
        "GroupedQueryAttention", **{"hidden": 8, "heads": 4, "kv_heads": 2, "head_dim": 6, "scale": 1.0, **more}
    )


def latent(**more):
    sizes = {"nope_dim": 5, "rope_dim": 2, "value_dim": 6, "kv_rank": 9, "query_rank": 11}
    return block("LatentAttention", hidden=8, heads=4, scale=1.0, **sizes, **more)


def recurrence(**more):
    sizes = {"heads": 6, "key_heads": 3, "key_dim": 5, "value_dim": 7, "conv_width": 4}
    return block("GatedDeltaNet", hidden=8, **sizes, norm_eps=1e-6, l2_eps=1e-6, **more)


def router(**more):
    return block("Router", **{"hidden": 8, "experts": 12, "top_k": 2, "score": "sigmoid", **more})


def limit(groups=4, kept=2, by="top2"):
    return block("GroupLimit", groups=groups, kept=kept, by=by)


def mixture(routing=None, shared: int | None = None):
    experts = block("Experts", experts=12, hidden=8, width=10, act="silu")
    wide = None if shared is None else block("GatedFeedForward", hidden=8, width=shared, act="silu")
    return block("MixtureOfExperts", router=routing or router(), experts=experts, shared=wide)


def layer(mixer: BlockSpec | None = None, ffn: BlockSpec | None = None):
    """A layer with either part, or both."""
    if mixer is not None and ffn is not None:
        return LayerKind.pre_norm(NORM, mixer, NORM, ffn)
    name, part = ("mixer", mixer) if mixer is not None else ("ffn", ffn)
    assert part is not None
    norm = PartSpec(name="norm", block=NORM, reads="x")
    return LayerKind(parts=[norm, PartSpec(name=name, block=part, reads="norm")], gives=f"x + {name}")


def model(kinds, order, **more):
    """kinds: letter -> kind. order: a letter a layer."""
    numbers = {letter: number for number, letter in enumerate(kinds)}
    layers = [LayerRun(first=index, count=1, kind=numbers[letter]) for index, letter in enumerate(order)]
    rotaries = [block("Rotary", dim=4, theta=10000.0), block("Rotary", dim=4, theta=500.0)]
    settings = {
        "rotaries": rotaries,
        "layer_kinds": list(kinds.values()),
        "layers": layers,
        "norm": NORM,
        "rules": [],
        **more,
    }
    return ModelSpec(name="x", checkpoint=IDENTITY, vocabulary=30, hidden=8, tied=False, **settings)


def claim(spec, field, value, **stated):
    """The verdict on one field, None where it stays unread."""
    claims, unread = check_claims([field], {**stated, field: value}, spec)
    assert bool(claims) != bool(unread)
    return claims[0].verdict if claims else None


def routed(shared=None, **more):
    """A dense layer, then five with experts."""
    return model({"d": layer(attention(), DENSE), "r": layer(attention(), mixture(router(**more), shared))}, "drrrrr")


ROUTED = routed(selection_bias=True, limit=limit(), normalise=block("Normalise"), scale=2.5, shared=30)
PLAIN = routed()
EVERY_SECOND = model({"d": layer(attention(), DENSE), "r": layer(attention(), mixture())}, "drdrdr")
HASH = block("HashRouter", hidden=8, experts=12, top_k=2, vocabulary=30, score="sigmoid")
HASHED = model(
    {
        "h": layer(attention(), mixture(HASH)),
        "r": layer(attention(), mixture(router(selection_bias=True))),
    },
    "hhhrrr",
)
HYBRID = model({"l": layer(recurrence(), DENSE), "a": layer(attention(gate="sigmoid"), DENSE)}, "lllalllal")
WINDOWED = model(
    {
        "f": layer(attention(heads=8, kv_heads=1), DENSE),
        "w": layer(attention(window=7, sinks=True, table=1, head_dim=4, value_dim=3), DENSE),
    },
    "fwwfww",
)
SLIDING = model({"f": layer(attention(), DENSE), "w": layer(attention(window=7), DENSE)}, "wwfwwf")
LATER = model({"f": layer(attention(), DENSE), "w": layer(attention(window=7), DENSE)}, "ffww")
CHUNKED = model({"c": layer(attention(chunk=16), DENSE), "n": layer(attention(rotary=None), DENSE)}, "cccn")
LETTERS = {
    "M": layer(block("Mamba2", hidden=8, heads=2, head_dim=6, state=3, conv_width=4)),
    "E": layer(None, mixture()),
    "*": layer(attention()),
    "-": layer(None, DENSE),
}
STATES = model(LETTERS, "MEM*E-M*")
INDEXER = block("LightningIndexer", hidden=8, source=11, heads=3, head_dim=6, top_k=9, key_norm_eps=1e-6, rotary="half")
LATENT = model(
    {
        "F": layer(latent(indexer=INDEXER), DENSE),
        "S": layer(latent(selection_from_earlier=True), DENSE),
    },
    "FFFSSSFSSSF",
)
NO_POSITIONS = model({"n": layer(latent(rotary=None, gate="element"), DENSE)}, "nn")


def compressed(rate):
    sizes = {"heads": 4, "head_dim": 6, "query_rank": 11, "groups": 2, "output_rank": 3}
    entries = block("Compressor", hidden=8, head_dim=6, rate=rate, norm_eps=1e-6, table=1) if rate else None
    eps = {"query_norm_eps": 1e-6, "key_norm_eps": 1e-6}
    return block("CompressedAttention", hidden=8, scale=1.0, window=7, compressor=entries, **sizes, **eps)


COMPRESSED = model({"0": layer(compressed(0), DENSE), "4": layer(compressed(4), DENSE)}, "0044")
STRETCHED = model(
    {"a": layer(attention(), DENSE)},
    "aa",
    rotaries=[block("Rotary", dim=4, theta=500.0, scaling="yarn", factor=4.0, original_length=64)],
)
LISTS = {"full_attn_layers": [4, 8], "kda_layers": [1, 2, 3, 5, 6, 7, 9], "num_heads": 6, "head_dim": 5}

CASES = [
    # (model, field, what is true of it, what is not; the rest of the config)
    (ROUTED, "scoring_func", "sigmoid", "softmax", {}),
    (ROUTED, "moe_router_activation_func", "sigmoid", "sqrtsoftplus", {}),
    (routed(score="softmax", scored="selected"), "scoring_func", "softmax", "sigmoid", {}),
    (HASHED, "scoring_func", "sigmoid", "softmax", {}),
    (ROUTED, "topk_method", "noaux_tc", "greedy", {}),
    (ROUTED, "topk_method", "noaux_tc", "group_limited_greedy", {"n_group": 4}),
    (PLAIN, "topk_method", "greedy", "noaux_tc", {}),
    (PLAIN, "topk_method", "group_limited_greedy", "noaux_tc", {"n_group": 1}),
    (PLAIN, "topk_method", "greedy", "group_limited_greedy", {"n_group": 4}),
    (routed(limit=limit(by="max")), "topk_method", "group_limited_greedy", "greedy", {"n_group": 4}),
    (routed(limit=limit(1, 1), selection_bias=True), "topk_method", "noaux_tc", "greedy", {"n_group": 1}),
    (HASHED, "topk_method", "noaux_tc", "greedy", {}),
    (ROUTED, "use_grouped_topk", True, False, {}),
    (PLAIN, "use_grouped_topk", True, None, {"num_expert_group": 1}),
    (PLAIN, "use_grouped_topk", False, True, {"num_expert_group": 4}),
    (ROUTED, "n_group", 4, 1, {}),
    (PLAIN, "num_expert_group", 1, 4, {}),
    (ROUTED, "topk_group", 2, 3, {}),
    (PLAIN, "topk_group", 1, 2, {}),
    (ROUTED, "use_routing_bias", True, False, {}),
    (PLAIN, "use_routing_bias", False, True, {}),
    (ROUTED, "norm_topk_prob", True, False, {}),
    (PLAIN, "moe_renormalize", False, True, {}),
    (routed(score="softmax", scored="selected"), "norm_topk_prob", True, False, {}),
    (ROUTED, "routed_scaling_factor", 2.5, 1.0, {}),
    (PLAIN, "routed_scaling_factor", 1, 2.5, {}),
    (PLAIN, "feed_forward_proj", "gated-silu", "gated-gelu", {}),
    (PLAIN, "feed_forward_proj", "gated-swish", "silu", {}),
    (EVERY_SECOND, "feed_forward_proj", "gated-silu", "relu", {}),
    (ROUTED, "moe_router_dtype", "float32", "bfloat16", {}),
    (ROUTED, "experts_per_token", 2, 4, {}),
    (ROUTED, "moe_topk", 2, 1, {}),
    (ROUTED, "moe_layer_freq", 1, 2, {"first_k_dense_replace": 1}),
    (EVERY_SECOND, "moe_layer_freq", [0, 1, 0, 1, 0, 1], [1, 0, 1, 0, 1, 0], {}),
    (EVERY_SECOND, "moe_layer_freq", [0, 1, 0, 1, 0, 1, 1], [0, 1, 0, 1, 0], {}),
    (ROUTED, "moe_layer_freq", [0, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 1], {}),
    (ROUTED, "first_k_dense_replace", 1, 0, {"moe_layer_freq": 1}),
    (ROUTED, "first_k_dense_replace", 1, 2, {}),
    (EVERY_SECOND, "decoder_sparse_step", 2, 1, {}),
    (EVERY_SECOND, "mlp_only_layers", [], [1], {"decoder_sparse_step": 2}),
    (ROUTED, "mlp_only_layers", [0], [], {}),
    (HASHED, "num_hash_layers", 3, 2, {}),
    (ROUTED, "mlp_layer_types", ["dense"] + ["sparse"] * 5, ["sparse"] * 6, {}),
    (HYBRID, "full_attention_interval", 4, 3, {}),
    (HYBRID, "attn_type_list", [0, 0, 0, 1, 0, 0, 0, 1, 0], [1, 0, 0, 1, 0, 0, 0, 1, 0], {}),
    (HYBRID, "layer_types", ["linear_attention"] * 3 + ["full_attention"] + ["linear_attention"] * 3
     + ["full_attention", "linear_attention"], ["full_attention"] * 9, {}),
    (HYBRID, "linear_attn_config", LISTS, {**LISTS, "full_attn_layers": [3, 8]}, {}),
    (HYBRID, "linear_attn_config", LISTS, {**LISTS, "kda_layers": [0, 1, 2, 4, 5, 6, 8]}, {}),
    (STATES, "hybrid_override_pattern", "MEM*E-M*", "MEM*E-MM", {}),
    (STATES, "hybrid_override_pattern", "MEM*|E-M*", "MEM*EEM*", {}),
    (STATES, "layers_block_type", ["mamba", "moe", "mamba", "attention", "moe", "mlp", "mamba", "attention"],
     ["mamba", "moe", "attention", "attention", "moe", "mlp", "mamba", "attention"], {}),
    (WINDOWED, "hybrid_layer_pattern", [0, 1, 1, 0, 1, 1], [1, 1, 0, 1, 1, 0], {}),
    (WINDOWED, "sliding_window", 7, 6, {}),
    (WINDOWED, "sliding_window_size", 6, 8, {}),
    (PLAIN, "sliding_window", None, 7, {}),
    (WINDOWED, "use_sliding_window", True, False, {}),
    (HYBRID, "use_sliding_window", False, True, {}),
    (SLIDING, "sliding_window_pattern", 3, 2, {}),
    (LATER, "max_window_layers", 2, 1, {}),
    (CHUNKED, "attention_chunk_size", 16, 8, {}),
    (PLAIN, "attention_chunk_size", None, 16, {}),
    (COMPRESSED, "compress_ratios", [0, 0, 4, 4, 0], [0, 4, 4, 4], {}),
    (LATENT, "index_topk_freq", 4, 2, {"index_skip_topk_offset": 3}),
    (LATENT, "index_skip_topk_offset", 3, 2, {"index_topk_freq": 4}),
    (LATENT, "index_topk_pattern", "FFFSSSFSSSF", "FFSSSSFSSSF", {}),
    (LATENT, "indexer_types", ["full"] * 3 + (["shared"] * 3 + ["full"]) * 2, ["full"] * 11, {}),
    (LATENT, "index_topk", 9, 8, {}),
    (HYBRID, "attn_output_gate", True, False, {}),
    (NO_POSITIONS, "mla_use_output_gate", True, False, {}),
    (PLAIN, "attn_output_gate", False, True, {}),
    (HYBRID, "use_full_rank_gate", True, False, {}),
    (model({"l": layer(recurrence(channel_decay=True, bound=-5.0), DENSE)}, "l"), "gate_lower_bound", -5, -4, {}),
    (model({"a": layer(attention(qk_norm="whole"), DENSE)}, "a"), "use_qk_norm", True, False, {}),
    (model({"a": layer(attention(qk_norm="whole"), DENSE)}, "a"), "qk_norm_type", "per_layer", "per_head", {}),
    (model({"a": layer(attention(qk_norm="head"), DENSE)}, "a"), "qk_norm_type", "per_head", "per_layer", {}),
    (PLAIN, "use_qk_norm", False, True, {}),
    (WINDOWED, "add_full_attention_sink_bias", False, True, {}),
    (WINDOWED, "add_swa_attention_sink_bias", True, False, {}),
    (HYBRID, "mamba_ssm_dtype", "float32", "bfloat16", {}),
    (LATENT, "rope_interleave", True, False, {}),
    (PLAIN, "rope_interleave", False, True, {}),
    (LATENT, "indexer_rope_interleave", False, True, {}),
    (NO_POSITIONS, "mla_use_nope", True, False, {}),
    (LATENT, "mla_use_nope", False, True, {}),
    (CHUNKED, "no_rope_layers", [1, 1, 1, 0], [1, 1, 0, 1], {}),
    (CHUNKED, "no_rope_layer_interval", 4, 2, {}),
    (WINDOWED, "rope_theta", 10000, 500, {}),
    (WINDOWED, "swa_rope_theta", 500, 10000, {}),
    (COMPRESSED, "compress_rope_theta", 500, 10000, {}),
    (LATENT, "qk_rope_head_dim", 2, 4, {}),
    (PLAIN, "rotary_dim", 4, 6, {}),
    (PLAIN, "partial_rotary_factor", 0.7, 1.0, {}),
    (STRETCHED, "initial_context_length", 64, 256, {}),
    (PLAIN.model_copy(update={"max_positions": 256}), "initial_context_length", 256, 64, {}),
    (PLAIN, "layernorm_epsilon", 1e-6, 1e-5, {}),
]  # fmt: skip


def named(case):
    return f"{case[1]}={json.dumps(case[2])}"[:50]


@pytest.mark.parametrize("case", CASES, ids=named)
def test_what_is_true_is_confirmed_and_what_is_not_is_contradicted(case):
    spec, field, true, false, config = case
    claims, unread = check_claims([field], {**config, field: true}, spec)
    assert (unread, {c.verdict for c in claims}) == ([], {"confirmed"})
    assert all(c.proven for c in claims)
    if false is not None:
        claims, unread = check_claims([field], {**config, field: false}, spec)
        assert unread == []
        assert "contradicted" in {c.verdict for c in claims}


SIZES = [
    (PLAIN, "num_local_experts", 12, 6, {}),
    (PLAIN, "moe_intermediate_size", 10, 20, {}),
    (ROUTED, "n_shared_experts", 3, 2, {}),
    (ROUTED, "shared_expert_intermediate_size", 30, 10, {}),
    (ROUTED, "shared_intermediate_size", 10, 20, {"n_shared_experts": 3}),
    (PLAIN, "num_hidden_layers", 6, 7, {}),
    (PLAIN, "intermediate_size", 20, 10, {}),
    (PLAIN, "num_attention_heads", 4, 8, {}),
    (PLAIN, "num_key_value_heads", 2, 4, {}),
    (PLAIN, "head_dim", 6, 2, {}),
    (LATENT, "head_dim", 7, 9, {}),
    (LATENT, "v_head_dim", 6, 7, {}),
    (LATENT, "qk_head_dim", 7, 5, {}),
    (LATENT, "qk_nope_head_dim", 5, 7, {}),
    (LATENT, "q_lora_rank", 11, 9, {}),
    (LATENT, "kv_lora_rank", 9, 11, {}),
    (LATENT, "index_n_heads", 3, 4, {}),
    (LATENT, "index_head_dim", 6, 3, {}),
    (WINDOWED, "num_attention_heads", 8, 6, {}),
    (WINDOWED, "swa_num_attention_heads", 4, 8, {}),
    (WINDOWED, "swa_num_key_value_heads", 2, 1, {}),
    (WINDOWED, "swa_head_dim", 4, 6, {}),
    (WINDOWED, "swa_v_head_dim", 3, 4, {}),
    (WINDOWED, "num_global_key_value_heads", 1, 2, {}),
    (WINDOWED, "global_head_dim", 6, 4, {}),
    (HYBRID, "linear_num_value_heads", 6, 3, {}),
    (HYBRID, "linear_num_key_heads", 3, 6, {}),
    (HYBRID, "linear_key_head_dim", 5, 7, {}),
    (HYBRID, "linear_value_head_dim", 7, 5, {}),
    (HYBRID, "linear_conv_kernel_dim", 4, 3, {}),
    (HYBRID, "linear_attn_config", {"num_heads": 6}, {"num_heads": 3}, {}),
]  # fmt: skip


@pytest.mark.parametrize("case", SIZES, ids=named)
def test_a_size_that_no_tensor_has_is_a_warning(case):
    spec, field, true, false, config = case
    assert claim(spec, field, true, **config) == "confirmed"
    assert claim(spec, field, false, **config) == "not the tensors'"


def test_every_meaning_has_a_case():
    tried = {MEANINGS[field] for _, field, *_ in [*CASES, *SIZES] if field in MEANINGS}
    tried |= {MEANINGS[f"linear_attn_config.{name}"] for name in LISTS}
    assert {name for name, meaning in MEANINGS.items() if meaning not in tried} == set()


def test_shared_experts_that_are_there_or_not():
    assert claim(PLAIN, "n_shared_experts", None) == claim(PLAIN, "shared_intermediate_size", 0) == "confirmed"
    assert claim(PLAIN, "n_shared_experts", 1) == claim(ROUTED, "n_shared_experts", 0) == "contradicted"
    assert claim(ROUTED, "shared_intermediate_size", 0) == "contradicted"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("scoring_func", "tanh"),
        ("topk_method", "novel"),
        ("use_routing_bias", "yes"),
        ("layer_types", ["novel"] * 6),
        ("hybrid_override_pattern", "MX"),
        ("attn_output_gate", "headwise"),
        ("qk_norm_type", "per_token"),
        ("linear_attn_config", {"num_heads": 6, "novel": 1}),
        ("novel", 1),
    ],
)
def test_what_has_no_known_meaning_stays_unread(field, value):
    claims, unread = check_claims([field], {field: value}, ROUTED)
    assert unread == [field]
    assert [c for c in claims if c.field == field] == []


def test_a_nested_part_is_contradicted_by_its_own_name():
    claims, unread = check_claims(
        ["linear_attn_config"], {"linear_attn_config": {**LISTS, "kda_layers": [1, 2]}}, HYBRID
    )
    assert unread == []
    assert {c.field: c.verdict for c in claims} == {
        "linear_attn_config.full_attn_layers": "confirmed",
        "linear_attn_config.kda_layers": "contradicted",
        "linear_attn_config.num_heads": "confirmed",
        "linear_attn_config.head_dim": "confirmed",
    }
    assert claims[1].states == "[1, 2]"
    assert claims[1].proven == "layers 2, 4-6, 8: recurs"


def test_what_nothing_computes_with_is_beside_the_point():
    for field in BESIDE:
        assert claim(PLAIN, field, 1) == "beside the point"
    assert claim(LATENT, "scoring_func", "sigmoid") == "beside the point"  # no router
    assert claim(HYBRID, "swa_rope_theta", 7) == "beside the point"  # no window
    assert claim(PLAIN, "max_window_layers", 3) == "beside the point"
    assert claim(PLAIN, "head_dim", None) == "beside the point"


@pytest.mark.parametrize(
    ("config", "defaults", "verdict"),
    [
        ({}, {}, "contradicted"),
        ({"use_sliding_window": False}, {}, "confirmed"),
        ({}, {"use_sliding_window": False}, "confirmed"),
        ({"use_sliding_window": True}, {"use_sliding_window": False}, "contradicted"),
        ({}, {"max_window_layers": 28}, "confirmed"),
        ({"max_window_layers": 4}, {"max_window_layers": 28}, "contradicted"),
        ({"layer_types": ["full_attention"] * 6}, {}, "confirmed"),
    ],
)
def test_a_window_that_another_field_gives_to_no_layer(config, defaults, verdict):
    claims, _ = check_claims(["sliding_window"], {**config, "sliding_window": 7}, PLAIN, defaults)
    assert [c.verdict for c in claims] == [verdict]


def test_what_the_class_knows_and_ignores_stops_nothing():
    config = {"sliding_window": 7, "scoring_func": "sigmoid", "head_dim": 5, "novel": 1}
    verdicts = {c.field: c.verdict for c in check_idle(config, config, PLAIN)}
    assert verdicts == {"sliding_window": "without effect", "scoring_func": "confirmed", "head_dim": "not the tensors'"}


def test_experts_that_attend_are_attention_and_no_feed_forward_layer():
    experts = block("Experts", experts=12, hidden=8, width=12, act=None, is_gated=False)
    heads = block("MixtureOfAttention", router=router(), experts=experts, kv_heads=2, scale=1.0)
    spec = model({"d": layer(heads, DENSE), "r": layer(heads, mixture())}, "dr")
    assert claim(spec, "attn_type_list", [1, 1]) == "confirmed"
    assert claim(spec, "layer_types", ["full_attention", "full_attention"]) == "confirmed"
    assert claim(spec, "feed_forward_proj", "gated-silu") == "confirmed"
    assert claim(spec, "feed_forward_proj", "gated-relu") == "contradicted"
    assert claim(spec, "moe_layer_freq", [0, 1]) == "confirmed"
    assert claim(spec, "moe_layer_freq", [1, 1]) == "contradicted"


def test_what_only_a_later_pass_computes_is_shown_too():
    kind = layer(attention(), DENSE)
    extra = PartSpec(name="ffn_2", block=mixture(), reads="mixer")
    steps = [StepSpec(name="ffn_2", part="ffn_2", reads="x")]
    again = AgainSpec(parts=[extra], steps=steps, gives="x + ffn_2")
    spec = model({"d": kind.model_copy(update={"again": again})}, "d")
    assert claim(spec, "scoring_func", "sigmoid") == "confirmed"
    assert claim(spec, "scoring_func", "softmax") == "contradicted"


def test_copied_code_confirms_nothing_and_still_contradicts():
    copied = block("Lifted", module="Novel", settings={}, handed={})
    spec = model({"r": layer(attention(), mixture()), "l": layer(copied, copied)}, "rl")
    assert claim(spec, "scoring_func", "sigmoid") is None
    assert claim(spec, "scoring_func", "softmax") == "contradicted"
    assert claim(spec, "moe_layer_freq", [1, 1]) is None
    assert claim(spec, "moe_layer_freq", [0, 1]) == "contradicted"
    assert claim(spec, "attn_type_list", [1, 1]) is None
    assert claim(spec, "attn_output_gate", False) is None


STATED = {"scoring_func": "sigmoid", "topk_method": "greedy", "global_head_dim": 99, "aux_loss_alpha": 0.1}


def with_fields(checkpoint, folder, **fields):
    """A copy of a checkpoint whose config.json says more."""
    shutil.copytree(checkpoint, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    return read_checkpoint(folder)


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    """A checkpoint whose routers score by a softmax, and whose config says otherwise; its class reads none of it."""
    folder = tmp_path_factory.mktemp("claims") / "stated"
    return with_fields(onboarded.checkpoint("mixtral"), folder, **STATED)


@pytest.mark.slow
def test_onboarding_stops_at_what_is_not_true_and_says_what_to_do(source):
    with pytest.raises(NotProven) as raised:
        specify_checkpoint(source, "x", {}, lambda line: None)
    (told,) = raised.value.unproven
    assert told.where == 'config.json: scoring_func = "sigmoid"'
    assert "router scores: softmax" in told.why
    assert "decisions.yaml" in told.why


@pytest.mark.slow
def test_a_person_may_accept_it_and_the_reports_tell(source):
    decisions = {"ignore_config": {"scoring_func": "an old export"}}
    specification, ledger = specify_checkpoint(source, "x", decisions, lambda line: None)
    assert {c.field: c.verdict for c in specification.claims} == {
        "scoring_func": "contradicted",
        "topk_method": "confirmed",
        "global_head_dim": "not the tensors'",
        "aux_loss_alpha": "beside the point",
    }
    assert [f.what for f in ledger.findings if "global_head_dim" in f.what] == [
        "global_head_dim=99 is stated, and not true of the tensors"
    ]
    plan = make_plan(specification.spec, devices=8, mode="lora", tokens_per_device=64)
    findings = Findings(claims=specification.claims, ignored_config=decisions["ignore_config"])
    for page in (render_markdown, render_html):
        text = page(specification.spec, ledger, plan, findings, Alignment())
        sections = re.split("Stated", text.partition("varied one at a time")[2])
        assert "topk_method" in sections[1]
        assert "true" in sections[1].splitlines()[0]
        assert "an old export" in sections[2]
        assert "99" in sections[3]
        assert "training loss" in sections[4]
