import json

import onboarded
import pytest
import torch

from dayzero.onboard.reference import build
from dayzero.onboard.shrink import layer_signatures, layers_to_cover, part_signature, shrink
from dayzero.onboard.tensor_names import pattern_of
from dayzero.runtime.headers import read_headers


def config_of(name, **changes):
    return {**json.loads((onboarded.checkpoint(name) / "config.json").read_text()), **changes}


@pytest.mark.parametrize("name", ["llama", "qwen3", "mixtral", "qwen3_moe", "olmoe"])
def test_the_small_model_has_the_same_names_in_other_sizes(name):
    small = shrink(config_of(name))
    model, _ = build(small, device="meta")
    big, _ = build(config_of(name), device="meta")
    patterns, wanted = ({pattern_of(n)[0] for n, _ in m.named_parameters()} for m in (model, big))
    assert patterns == wanted
    sizes = {dim for _, p in model.named_parameters() for dim in p.shape}
    assert {48, 131, 24 if name == "olmoe" else 42} <= sizes  # hidden, vocabulary, key heads together
    for _, parameter in model.named_parameters():
        rows, columns = parameter.shape[-2:] if parameter.ndim > 1 else (0, 1)
        assert rows != columns or name == "olmoe", parameter.shape


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
    assert (small["num_hidden_layers"], small["layer_types"], small["sliding_window"]) == (4, types[:4], 7)


def test_token_ids_fit_the_small_vocabulary():
    small = shrink(config_of("llama", bos_token_id=300, eos_token_id=[301, 302], pad_token_id=None))
    assert all(token < small["vocab_size"] for token in [small["bos_token_id"], *small["eos_token_id"]])


def test_the_given_config_is_not_changed():
    config = config_of("qwen3_moe")
    before = json.dumps(config)
    shrink(config)
    assert json.dumps(config) == before


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


def test_a_part_has_its_own_signature():
    layers = layer_signatures(Layered([1, 2]))
    assert part_signature(layers[0], "part") == part_signature(layers[1], "part")
    assert layers[0] != layers[1]
    assert read_headers(onboarded.checkpoint("llama"))
