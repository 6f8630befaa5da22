"""`onboard inspect` on the headers of real checkpoints, and on such that contradict themselves."""

import functools

import pytest
import skeleton

from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.inspect.classify import classify
from dayzero.onboard.inspect.tensor_names import counted

# Manifest: mixers, feed-forwards, (experts, a token, shared), formats, further-token layers.
FACTS = {
    "DeepSeek-V3.2": ({"sparse-indexed": 61}, {"dense": 3, "routed": 58}, (256, 8, 1), {"fp8_block"}, 1),
    "DeepSeek-V4-Flash": (
        {"sliding": 2, "sparse-indexed": 21, "compressed": 20},
        {"hashed": 3, "routed": 40},
        (256, 6, 1),
        {"fp8_ue8m0", "mxfp4_packed"},
        3,
    ),
    "GLM-5.2-FP8": ({"sparse-indexed": 78}, {"dense": 3, "routed": 75}, (256, 8, 1), {"fp8_block"}, 1),
    "Kimi-K3": ({"linear": 69, "latent": 24}, {"dense": 1, "routed": 92}, (896, 16, 2), {"mxfp4_packed"}, 0),
    "Kimi-Linear-48B-A3B": ({"linear": 20, "latent": 7}, {"dense": 1, "routed": 26}, (256, 8, 1), set(), 0),
    "MiniMax-M2.7": ({"full": 62}, {"routed": 62}, (256, 8, 0), {"fp8_block"}, 0),
    "Qwen3-Next-80B-A3B": ({"linear": 36, "full": 12}, {"routed": 48}, (512, 10, 1), set(), 1),
    "Qwen3.6-35B-A3B": ({"linear": 30, "full": 10}, {"routed": 40}, (256, 8, 1), set(), 0),
    "gpt-oss-20b": ({"sliding": 12, "full": 12}, {"routed": 24}, (32, 4, 0), {"mxfp4_blocks"}, 0),
}
HEAVY = {"Kimi-K3"}
names = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in HEAVY else []) for name in FACTS]
)


@functools.cache
def checkpoint(name):
    return skeleton.checkpoint(name)


@functools.cache
def ledger(name):
    return classify(checkpoint(name))


def whats(found, kind=None):
    return [finding.what for finding in found.findings if kind in {None, finding.kind}]


def changed(name, listed=None, **changes):
    return classify(skeleton.checkpoint(name, listed, **changes))


@pytest.mark.slow
@names
def test_kinds_experts_and_formats(name):
    mixers, feed_forwards, experts, formats, further = FACTS[name]
    found = ledger(name)
    assert found.layer_counts() == {"mixer": mixers, "ffn": feed_forwards}
    assert (found.experts.count, found.experts.top_k, found.experts.shared) == experts
    assert found.formats().keys() == formats
    assert found.mtp == further
    assert (found.unaccounted, found.unread_config) == ([], [])
    assert not found.tied
    assert not whats(found, "damage")


@pytest.mark.slow
@names
def test_every_tensor_and_byte_is_in_one_group(name):
    listed, found = skeleton.tensors(name), ledger(name)
    assert found.tensors == len(listed) == sum(group.count for group in found.groups)
    assert found.bytes == sum(skeleton.size(*tensor[1:]) for tensor in listed) == sum(g.bytes for g in found.groups)
    assert sum(line["bytes"] for line in found.budget().values()) == found.bytes
    assert sum(line["parameters"] for line in found.budget().values()) == found.parameters
    assert all(run.evidence for run in found.layers)


@names
def test_scales_belong_to_their_weights(name):
    """Every packed weight has its scales, both are of the same layers, and scales count no parameters."""
    found = ledger(name)
    by_pattern = {}
    for group in found.groups:
        by_pattern.setdefault((group.pattern, group.layers), group)
    packed = [group for group in found.groups if group.format]
    for group in packed:
        assert len(group.parts) >= 2
        assert group.pattern in group.parts.values()
        for role, pattern in group.parts.items():
            part = by_pattern[pattern, group.layers]
            assert (part.count, part.role, part.part) == (group.count, group.role, group.part), role
            if pattern != group.pattern:
                assert part.part_of == group.pattern
                assert part.elements == 0
    assert sum(group.part_of is not None for group in found.groups) == sum(len(g.parts) - 1 for g in packed)


def test_parameters_of_models_that_are_known():
    known = {"DeepSeek-V3.2": 685.4e9, "Kimi-Linear-48B-A3B": 49.1e9, "Qwen3-Next-80B-A3B": 81.3e9}
    known |= {"gpt-oss-20b": 20.9e9, "MiniMax-M2.7": 228.7e9, "GLM-5.2-FP8": 753.3e9, "Qwen3.6-35B-A3B": 34.66e9}
    for name, count in known.items():
        assert abs(ledger(name).parameters / count - 1) < 0.001, name


@pytest.mark.slow
def test_kimi_k3_from_its_files(tmp_path):
    found = read_checkpoint(skeleton.make("Kimi-K3", tmp_path / "k3"))
    assert (len(found.headers), found.total_bytes) == (497_220, 1_560_860_324_864)
    assert sum(file.stat().st_blocks for file in found.path.iterdir()) * 512 < 200_000_000
    held = classify(found)
    assert held == ledger("Kimi-K3").model_copy(update={"quantization": held.quantization})
    assert held.parameters == 2_779_931_837_184
    routed = held.budget()["routed experts"]["parameters"]
    assert f"{100 * routed / held.parameters:.1f}" == "97.9"
    assert len(held.model_dump_json()) < 100_000
    by_mixer = {}
    for run in held.layers:
        by_mixer.setdefault(run.mixer, []).extend(counted(run.layers))
    assert by_mixer["latent"] == [*range(3, 92, 4), 92]
    assert {run.residual for run in held.layers} == {"attention-residual"}
    carried = {group.part for group in held.groups if group.fate == "carried"}
    assert carried == {"vision", "projector"}
    assert sum(group.count for group in held.groups if group.fate == "carried") == 168
    expert = next(group for group in held.groups if group.pattern.endswith("w1.weight_packed"))
    assert (expert.format, expert.logical_shape) == ("mxfp4_packed", [3072, 3584])
    assert (expert.layers, expert.experts, expert.missing) == ("1-92", "0-895", 0)
    padded = next(group for group in held.groups if group.pattern.endswith("A_log"))
    assert "first 96" in padded.note
    layouts = whats(held, "layout")
    assert "A_log is padded: 128 stored, 96 heads" in layouts
    for field in ("full_attn_layers", "kda_layers"):
        assert f"text_config.linear_attn_config.{field} counts layers from 1" in layouts
    plain = next(f for f in held.findings if "stored plain" in f.what)
    for module in ("routed_expert_down_proj", "routed_expert_up_proj", "mlp_res_proj", "self_attention_res_proj"):
        assert module in plain.evidence[0]
    assert any("'kimi_linear'" in what and "KimiK3" in what for what in whats(held, "contradiction"))


def test_what_other_checkpoints_contradict():
    glm = ledger("GLM-5.2-FP8")
    assert next(run.layers for run in glm.layers if "shared" in run.evidence[-1]).startswith("3-5, 7-9")
    assert sum("indexer_types says shared" in line for run in glm.layers for line in run.evidence) == 1
    owners = [counted(run.layers) for run in glm.layers if "has an indexer" in run.evidence[0]]
    assert sum(map(len, owners)) == 21
    assert any("weights_proj" in f.evidence[0] for f in glm.findings if "only others" in f.what)
    minimax = ledger("MiniMax-M2.7")
    assert "further-token layers are promised, and none is stored" in whats(minimax, "contradiction")
    assert "further-token layers are stored: 3" in whats(ledger("DeepSeek-V4-Flash"), "contradiction")
    assert "vision_config describes a vision tower, and none is stored" in whats(ledger("Qwen3.6-35B-A3B"))
    float32 = next(f for f in ledger("DeepSeek-V3.2").findings if f.what.startswith("float32"))
    assert "mlp.gate.e_score_correction_bias" in float32.evidence[0]


def test_lists_that_count_from_0_or_1_or_lie():
    """The same field, under either convention, and one that fits neither."""
    lists = skeleton.config("Kimi-Linear-48B-A3B")["linear_attn_config"]
    from_0 = {**lists, **{k: [n - 1 for n in v] for k, v in lists.items() if k.endswith("layers")}}
    assert not [what for what in whats(changed("Kimi-Linear-48B-A3B", linear_attn_config=from_0)) if "_layers" in what]
    wrong = {**lists, "full_attn_layers": [2, *lists["full_attn_layers"][1:]]}
    found = changed("Kimi-Linear-48B-A3B", linear_attn_config=wrong)
    assert "linear_attn_config.full_attn_layers does not fit the tensors" in whats(found, "contradiction")
    assert found.layer_counts()["mixer"] == {"linear": 20, "latent": 7}


@pytest.mark.parametrize("model_type", ["llama", "gpt_oss", "kimi_k3", "", None])
def test_no_name_decides(model_type):
    found = changed("Kimi-Linear-48B-A3B", model_type=model_type, architectures=["Renamed"])
    assert (found.layers, found.experts) == (ledger("Kimi-Linear-48B-A3B").layers, found.experts)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "value", "what"),
    [
        ("num_hidden_layers", 25, "num_hidden_layers=25, yet layers 25-26 are stored"),
        ("num_hidden_layers", 30, "num_hidden_layers=30, yet only 27 of these layers have tensors"),
        ("num_experts", 128, "num_experts=128 does not fit the tensors"),
        ("vocab_size", 5, "vocab_size=5 does not fit the tensors"),
        ("hidden_size", 2305, "hidden_size=2305 does not fit the tensors"),
        ("first_k_dense_replace", 2, "first_k_dense_replace=2 does not fit the tensors"),
        ("num_nextn_predict_layers", 1, "further-token layers are promised, and none is stored"),
        ("tie_word_embeddings", True, "the head is stored although the config ties it to the embedding"),
        ("quantization_config", {"quant_method": "fp8"}, "quantization_config describes tensors that are not there"),
        ("vision_config", {"depth": 2}, "vision_config describes a vision tower, and none is stored"),
    ],
)
def test_a_config_that_the_tensors_contradict(field, value, what):
    found = changed("Kimi-Linear-48B-A3B", **{field: value})
    assert what in whats(found)


@pytest.mark.parametrize(
    ("head", "outer", "inner", "tied"),
    [
        (True, False, True, False),
        (True, None, True, False),
        (True, True, None, True),
        (True, None, False, False),
        (True, None, None, False),
        (False, True, False, True),
        (False, None, None, True),
        (False, False, None, True),
    ],
)
def test_tied_by_outer_config_and_tensors(head, outer, inner, tied):
    """A head that is stored is the head, whatever an inner config says against the outer one."""
    text = {**skeleton.config("Qwen3.6-35B-A3B")["text_config"], "tie_word_embeddings": inner}
    listed = [tensor for tensor in skeleton.tensors("Qwen3.6-35B-A3B") if head or tensor[0] != "lm_head.weight"]
    text = {name: value for name, value in text.items() if value is not None}
    found = changed("Qwen3.6-35B-A3B", listed, text_config=text, tie_word_embeddings=... if outer is None else outer)
    assert found.tied == tied
    assert ("the head is missing" in whats(found)) == (not head and outer is False)


def test_a_hole_in_a_pattern_is_damage():
    gone = "model.layers.7.block_sparse_moe.experts.12.w1.weight"
    listed = [tensor for tensor in skeleton.tensors("Kimi-Linear-48B-A3B") if tensor[0] != gone]
    found = changed("Kimi-Linear-48B-A3B", listed)
    damage = next(finding for finding in found.findings if finding.kind == "damage")
    assert damage.what == "1 tensors are missing from a regular pattern"
    assert gone in damage.evidence[0]


def test_packed_tensors_without_their_scales():
    listed = [tensor for tensor in skeleton.tensors("gpt-oss-20b") if not tensor[0].endswith("down_proj_scales")]
    found = changed("gpt-oss-20b", listed)
    assert "a tensor of packed numbers has no scales that are known here" in whats(found, "damage")
    silent = changed("gpt-oss-20b", quantization_config=...)
    assert "weights are quantised, and no quantization_config says so" in whats(silent, "contradiction")


def test_fields_are_read_known_or_named():
    found = changed("gpt-oss-20b", mystery_factor=2, final_logit_softcapping=30.0, temperature=0.7, top_k=50)
    assert found.unread_config == ["mystery_factor"]
    assert found.maths_config["final_logit_softcapping"] == "output"
    assert found.maths_config["swiglu_limit"] == "activation"
    assert not {"layer_types", "num_local_experts", "sliding_window", "temperature"} & found.maths_config.keys()
