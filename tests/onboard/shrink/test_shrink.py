import json
from pathlib import Path

import onboarded
import pytest
import torch
from zoo import families

from dayzero.onboard.inspect.tensor_names import pattern_of
from dayzero.onboard.oracle.reference import build, load_config, redraw, run
from dayzero.onboard.shrink.canonical_config import canonical, set_by
from dayzero.onboard.shrink.layers import followed, kind_of, layer_list
from dayzero.onboard.shrink.shrink import (
    SEQUENCE,
    NoSmallSizes,
    layer_signatures,
    layers_to_cover,
    part_signature,
    shrink,
    shrink_model,
    text_path,
)
from dayzero.onboard.shrink.sizes import resized, sizes_of, small_sizes
from dayzero.onboard.shrink.trial import Trial

CONFIGS = Path(__file__).parents[2] / "data" / "configs"
# Published configs that transformers has a class for, and the layers that a small model of them keeps.
PUBLISHED = {
    "DeepSeek-V3": [0, 1, 2, 3],
    "DeepSeek-V4-Flash": [0, 1, 2, 3, 4],
    "GLM-5.2": [0, 3, 6],
    "MiMo-V2-Flash": [0, 1, 2, 3, 4, 5],
    "Mixtral-8x7B-v0.1": [0, 1],
    "Nemotron-3-Super-120B-A12B-FP8": [0, 1, 7],
    "Qwen3.5-35B-A3B": [0, 1, 2, 3],
    "gemma-4-26B-A4B": [0, 5, 28, 29],
}
MORE_PUBLISHED = {
    "DeepSeek-V3.2": [0, 1, 2, 3],
    "GLM-5.2-FP8": [0, 3, 6],
    "Kimi-K2-Instruct": [0, 1],
    "Llama-4-Scout-17B-16E-Instruct": [0, 1, 2, 3],
    "MiniMax-M2.7": [0, 1],
    "Nemotron-3-Nano-30B-A3B": [0, 1, 2, 3, 4, 5],
    "Qwen3-235B-A22B-FP8": [0, 1],
    "Qwen3-30B-A3B": [0, 1],
    "Qwen3-Next-80B-A3B": [0, 1, 2, 3],
    "Qwen3.5-397B-A17B": [0, 1, 2, 3],
    "Qwen3.6-35B-A3B": [0, 1, 2, 3],
    "gpt-oss-20b": [0, 1],
}


def config_of(name, **changes):
    return {**json.loads((onboarded.checkpoint(name) / "config.json").read_text()), **changes}


def published(name):
    return json.loads((CONFIGS / f"{name}.json").read_text())


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "qwen3_moe", "olmoe"])
def test_the_small_model_has_the_same_names_in_other_sizes(name):
    small = shrink(config_of(name))
    model, _ = build(small, device="meta")
    big, _ = build(config_of(name), device="meta")
    patterns, wanted = ({pattern_of(n)[0] for n, _ in m.named_parameters()} for m in (model, big))
    assert patterns == wanted
    sizes = {dim for _, p in model.named_parameters() for dim in p.shape}
    assert {72, 131, 36 if name == "olmoe" else 48} <= sizes  # hidden, vocabulary, key heads together
    for _, parameter in model.named_parameters():
        rows, columns = parameter.shape[-2:] if parameter.ndim > 1 else (0, 1)
        assert rows != columns or name == "olmoe", parameter.shape


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "kept"),
    [*PUBLISHED.items(), *(pytest.param(*item, marks=pytest.mark.slow) for item in MORE_PUBLISHED.items())],
)
def test_a_published_config_shrinks_to_a_model_that_runs(name, kept):
    config = published(name)
    shrunk = shrink_model(config)
    assert shrunk.kept == kept
    small, _ = build(shrunk.config)
    redraw(small, torch.Generator().manual_seed(0))
    ids = torch.randint(3, 131, (1, SEQUENCE), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = run(small, ids)
    assert logits.shape == (1, SEQUENCE, 131)
    assert torch.isfinite(logits).all()
    assert sum(parameter.numel() for parameter in small.parameters()) < 3e6
    full, _ = build(config, device="meta")
    signatures = [kind_of(signature) for signature in layer_signatures(full)]
    small_layers = [dict(kind_of(signature)) for signature in layer_signatures(small)]
    assert len(shrunk.follows) == len(signatures)
    for layer, stands_in in enumerate(shrunk.follows):
        assert signatures[layer] == signatures[kept[stands_in]]
        tensors = {entry for entry in signatures[layer] if entry[0].startswith("shape of ")}
        assert tensors <= small_layers[stands_in].items()


def test_dimensions_that_differ_in_the_real_model_differ_in_the_small_one():
    shrunk = shrink_model(published("DeepSeek-V3"))
    small, real = (
        dict(layer_list(build(c, device="meta")[0]).named_parameters()) for c in (shrunk.config, shrunk.full)
    )
    means = {}
    for name, parameter in small.items():
        for one, other in zip(parameter.shape, real[name].shape, strict=True):
            assert means.setdefault(one, other) == other, name


def test_what_is_seen_only_in_short_sequences_is_made_short():
    small = shrink(published("DeepSeek-V3.2"))
    assert small["index_topk"] < SEQUENCE
    assert 1 < small["topk_group"] < small["n_group"]
    assert small["n_routed_experts"] // small["n_group"] > 2  # a group's best two are not the whole group
    assert small["num_experts_per_tok"] > small["n_routed_experts"] // small["n_group"]  # more than one group can give
    assert shrink(published("MiMo-V2-Flash"))["sliding_window"] < SEQUENCE
    capacity = shrink(families.config("switch_transformers"))
    assert capacity["expert_capacity"] < SEQUENCE // 4  # of 12 experts, one is asked more often than that


def test_a_checkpoint_of_any_size_shrinks_to_the_same():
    real = {"hidden_size": 4096, "num_hidden_layers": 40, "num_local_experts": 64, "vocab_size": 100_000}
    assert shrink(config_of("mixtral")) == shrink(config_of("mixtral", **real))


def test_enough_layers_are_kept_to_see_every_kind():
    kinds = shrink(config_of("qwen3_moe", num_hidden_layers=9, mlp_only_layers=[0, 1, 2, 4, 7]))
    assert kinds["num_hidden_layers"] == 4
    assert kinds["mlp_only_layers"] == [0, 1, 2]
    types = ["full_attention"] * 3 + ["sliding_attention"] + ["full_attention"] * 3
    mixed = config_of("qwen3", num_hidden_layers=7, layer_types=types, use_sliding_window=True, sliding_window=5)
    small = shrink(mixed)
    assert (small["num_hidden_layers"], small["layer_types"], small["sliding_window"]) == (4, types[:4], 9)


def test_layers_far_apart_are_brought_together():
    types = ["full_attention"] * 40
    types[30] = "sliding_attention"
    config = config_of("qwen3", num_hidden_layers=40, layer_types=types, use_sliding_window=True, sliding_window=5)
    shrunk = shrink_model(config)
    assert shrunk.kept == [0, 30]
    assert shrunk.config["layer_types"] == ["full_attention", "sliding_attention"]
    assert shrunk.follows == [1 if layer == 30 else 0 for layer in range(40)]
    sparse = config_of("qwen3_moe", num_hidden_layers=40, mlp_only_layers=[*range(20), 33])
    assert shrink_model(sparse).kept == [0, 20]


def test_token_ids_fit_the_small_vocabulary():
    small = shrink(config_of("llama", bos_token_id=300, eos_token_id=[301, 302], pad_token_id=None))
    assert all(token < small["vocab_size"] for token in [small["bos_token_id"], *small["eos_token_id"]])


def test_the_given_config_is_not_changed():
    config = config_of("qwen3_moe")
    before = json.dumps(config)
    shrink(config)
    assert json.dumps(config) == before


@pytest.mark.parametrize("name", ["GLM-5.2", "DeepSeek-V4-Flash", "gemma-4-26B-A4B", "Qwen3.5-35B-A3B"])
def test_the_canonical_config_loads_to_the_same(name):
    config = published(name)
    made = canonical(config)
    ours, theirs = load_config(made).to_dict(), load_config(config).to_dict()
    for held in (ours, theirs):
        held.pop("_name_or_path")
        held.pop("architectures")
    assert ours == theirs
    assert "qk_head_dim" not in canonical(published("DeepSeek-V3"))  # the sum of two others


def test_the_text_part_of_a_composite_is_found():
    config = canonical(published("Qwen3.5-35B-A3B"))
    assert text_path(config, 40) == ("text_config",)
    assert text_path(canonical(config_of("mixtral")), 3) == ()


class Layered(torch.nn.Module):
    def __init__(self, scalars, widths=None):
        super().__init__()
        self.stack = torch.nn.ModuleList()
        for number, scalar in enumerate(scalars):
            layer = torch.nn.Module()
            layer.index, layer.limit = number, scalar
            layer.part = torch.nn.Linear(3, widths[number] if widths else 4)
            self.stack.append(layer)


@pytest.mark.parametrize(
    ("scalars", "widths", "kept"),
    [([1, 1, 1], None, 2), ([1, 2, 1], None, 2), ([1, 1, 2, 1], None, 3), ([1, 1, 1], [4, 4, 5], 3), ([1], None, 1)],
)
def test_layers_differ_by_shapes_and_scalars_but_not_by_their_number(scalars, widths, kept):
    assert layers_to_cover(layer_signatures(Layered(scalars, widths))) == kept


def test_a_number_that_grows_with_the_layers_only_counts_them():
    assert layers_to_cover(layer_signatures(Layered([0.9, 0.8, 0.7, 0.6, 0.5]))) == 2
    assert layers_to_cover(layer_signatures(Layered([0.9, 0.8, 0.7, 0.6, 0.7]))) == 4


def test_numbers_of_another_value_are_no_other_kind():
    kinds = [kind_of(signature) for signature in layer_signatures(Layered([7.0, 10.0, None, 0.0, 7.0]))]
    assert kinds[0] == kinds[1] == kinds[4]
    assert len({kinds[0], kinds[2], kinds[3]}) == 3
    assert followed(layer_signatures(Layered([7.0, 10.0, 7.0, 12.0])), [0, 1]) == [0, 1, 0, 0]


def test_a_part_has_its_own_signature():
    layers = layer_signatures(Layered([1, 2]))
    assert part_signature(layers[0], "part") == part_signature(layers[1], "part")
    assert layers[0] != layers[1]


def refusing(*rules):
    """Attempts of a model with these demands on its config, checked in this order."""

    def attempt(config):
        for step, (message, demand) in enumerate(rules):
            if not demand(config):
                return Trial("not run", step, message)
        return Trial("runs", len(rules))

    return attempt


def settled(config, *rules):
    held = {"n": 0}

    def attempt(small):
        held["n"] += 1
        return refusing(*rules)(small)

    return small_sizes(config, (), frozenset(), lambda changed: True, attempt, lambda changed: set()), held["n"]


def test_relations_that_the_model_needs_are_kept_and_accidents_dropped():
    config = {"hidden_size": 4096, "inner_a": 8192, "inner_b": 8192, "rank_x": 512, "rank_y": 512, "parts": 64}
    small, tries = settled(
        config,
        ("mismatch", lambda c: c["inner_a"] == c["inner_b"]),
        ("no multiple", lambda c: c["inner_a"] % c["parts"] == 0),
    )
    assert small["inner_a"] == small["inner_b"]
    assert small["inner_a"] % small["parts"] == 0
    assert small["rank_x"] != small["hidden_size"] != small["inner_a"]
    assert tries < 100
    assert all(value < 150 for value in small.values())


def test_sums_and_products_are_found():
    config = {"head_total": 192, "head_one": 128, "head_two": 64, "groups_inner": 40, "width_inner": 96, "inner": 3840}
    small, _ = settled(
        config,
        ("not the sum", lambda c: c["head_total"] == c["head_one"] + c["head_two"]),
        ("not the product", lambda c: c["groups_inner"] * c["width_inner"] == c["inner"]),
    )
    assert small["inner"] < 3840


def test_a_model_that_never_runs_says_so():
    with pytest.raises(NoSmallSizes, match="never"):
        settled({"hidden_size": 4096}, ("never", lambda c: False))


def test_sizes_in_lists_and_by_layer_are_sizes():
    config = {"widths": [36, 20, 36], "per_layer_config": {"0": {"heads": 6}, "2": {"heads": 6}}, "flag": True}
    sizes = sizes_of(config)
    assert sizes == {(("widths",), 36): 36, (("widths",), 20): 20, (("per_layer_config", "heads"), 6): 6}
    changed = resized(config, {(("widths",), 36): 10, (("per_layer_config", "heads"), 6): 4})
    assert changed["widths"] == [10, 20, 10]
    assert changed["per_layer_config"] == {"0": {"heads": 4}, "2": {"heads": 4}}


@pytest.mark.parametrize(
    ("section", "total", "wanted"),
    [([24, 20, 20], 8, [4, 2, 2]), ([22, 22, 20], 6, [2, 2, 2]), ([11, 11, 10], 4, [1, 1, 2])],
)
def test_rotary_sections_are_split_in_proportion(section, total, wanted):
    config = {"rope_parameters": {"mrope_section": section}}
    path = ("rope_parameters", "mrope_section")
    assert resized(config, {(path, sum(section)): total})["rope_parameters"]["mrope_section"] == wanted


def test_fields_that_set_others_are_known_by_changing_them():
    assert set_by(published("DeepSeek-V4-Flash"), "num_hash_layers") == ["mlp_layer_types"]
    assert set_by(published("Nemotron-3-Nano-30B-A3B"), "hybrid_override_pattern") == ["layers_block_type"]
    nested = set_by(published("gemma-4-26B-A4B"), "text_config.global_head_dim")
    assert all(name.startswith("text_config.per_layer_config.") for name in nested)
    assert len(nested) == 5
    assert set_by(published("DeepSeek-V3"), "topk_method") == []  # says something that no module reads
    assert set_by(config_of("mixtral"), "no_such_field") == []
