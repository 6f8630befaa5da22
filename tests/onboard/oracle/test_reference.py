"""The oracle: which class it builds, what it reads, what it replaces."""

import types

import pytest
import torch
from torch import nn
from zoo import families

from dayzero.onboard.oracle import reference
from dayzero.onboard.oracle.constructed import built_like, constructed_with, noting_arguments
from dayzero.onboard.oracle.reference import (
    UnknownArchitecture,
    build,
    fails_on_text,
    load_config,
    logits_of,
    model_class,
)
from dayzero.onboard.oracle.training_modes import allow_gradients, replaced, with_gradients


def test_a_composite_is_run_by_its_text_alone():
    model, reads = build(families.config("qwen3_vl_moe"), record=True)
    reference.redraw(model, torch.Generator().manual_seed(0))
    with torch.no_grad():
        logits = reference.run(model, torch.arange(3, 12)[None])
    assert logits.shape == (1, 9, 199)
    text = reference.text_model(model)
    assert text is model.model.language_model
    assert text.config is reference.text_config(model)
    assert reference.text_prefix(model.config) == "text_config."
    assert any(name.startswith("model.visual.") for name, _ in model.named_parameters())
    assert {"num_experts_per_tok", "text_config.num_experts_per_tok", "rope_parameters.mrope_section"} <= reads
    assert "vision_config.patch_size" in reads
    assert "patch_size" not in reads


def test_a_flat_model_is_its_own_text():
    model, _ = build(families.config("mixtral"), device="meta")
    assert reference.text_model(model) is model
    assert reference.text_prefix(model.config) == ""


def test_an_encoder_and_its_decoder_are_fed_the_same_ids():
    model, _ = build(families.config("switch_transformers"))
    reference.redraw(model, torch.Generator().manual_seed(0))
    ids = torch.arange(3, 12)[None]
    assert reference.inputs(model, ids).keys() == {"input_ids", "use_cache", "decoder_input_ids"}
    with torch.no_grad():
        assert torch.isfinite(reference.run(model, ids)).all()


@pytest.mark.parametrize("architectures", [["SarvamMoEForCausalLM"], [], ["NoSuchClass"]])
def test_a_config_without_a_class_of_its_own_gets_the_one_that_the_library_has_for_it(architectures):
    config = load_config(families.config("sarvam_moe"))
    assert model_class(config, architectures).__name__ == "Glm4MoeForCausalLM"


def test_a_class_that_gives_no_logits_is_not_taken():
    config = load_config(families.config("mixtral"))
    both = ["MixtralForSequenceClassification", "MixtralForCausalLM"]
    assert model_class(config, both).__name__ == "MixtralForCausalLM"
    for given in (config, nn.Identity()):
        with pytest.raises(UnknownArchitecture, match="MixtralForSequenceClassification"):
            model_class(given, both[:1])


def test_a_class_that_is_named_and_not_there_is_not_replaced_by_the_one_of_the_config():
    config = load_config(families.config("mixtral"))
    with pytest.raises(UnknownArchitecture, match=r"there is no NovelForCausalLM; .* there is MixtralForCausalLM"):
        model_class(config, ["NovelForCausalLM"])
    assert model_class(config, []).__name__ == "MixtralForCausalLM"


def test_capitals_and_underscores_of_a_class_are_no_difference():
    config = load_config(families.config("kimi_k25"))
    assert model_class(config, ["KimiK25ForConditionalGeneration"]).__name__ == "Kimi_K25ForConditionalGeneration"


def test_an_unknown_type_with_a_known_class_is_that_class():
    config = {**families.config("mixtral"), "model_type": "never_heard_of"}
    model, _ = build(config, device="meta")
    assert type(model).__name__ == "MixtralForCausalLM"
    assert model.config.num_local_experts == 15
    with pytest.raises(UnknownArchitecture, match="never_heard_of"):
        load_config({**config, "architectures": ["NeverHeardOf"]})


def test_who_reads_what():
    model, reads = build(families.config("mixtral"), record=True)
    paths = model.config_reads.paths(model)
    assert paths["num_key_value_heads"] == [f"model.layers.{layer}.self_attn" for layer in range(4)]
    assert "model.layers.0.mlp.gate" in paths["num_local_experts"]
    assert "rope_parameters.rope_theta" in reads
    before = set(reads)
    reference.redraw(model, torch.Generator().manual_seed(0))
    with torch.no_grad():
        reference.run(model, torch.arange(3, 12)[None])
    assert reads > before  # what is only read when it runs
    assert "_name_or_path" not in reads
    assert "base_model_tp_plan" not in reads


def test_a_field_that_only_another_field_is_made_of_counts_as_read():
    config = families.config("qwen3_next")
    config.pop("layer_types")
    _, reads = build({**config, "full_attention_interval": 4}, device="meta", record=True)
    assert "layer_types" in reads


def test_a_copy_of_a_config_is_recorded_too():
    import copy

    from dayzero.onboard.oracle.config_reads import Reads, record

    config, reads = load_config(families.config("mixtral")), Reads()
    record(config, reads)
    copied = copy.deepcopy(config)
    assert copied.num_local_experts == 15
    assert copied.rope_parameters["rope_theta"] == config.to_dict()["rope_parameters"]["rope_theta"]
    assert {"num_local_experts", "rope_parameters", "rope_parameters.rope_theta"} <= reads.fields
    assert config.to_dict()["num_local_experts"] == 15


class Inner(nn.Module):
    def __init__(self, width, *, eps=1e-5):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps


class Outer(Inner):
    def __init__(self, config, number, **more):
        super().__init__(config["width"], eps=0.5)
        self.inner = Inner(3)


class AnyNumber(nn.Module):
    def __init__(self, *parts):
        super().__init__()


def test_constructor_arguments_of_every_module():
    config = {"width": 4}
    with noting_arguments():
        first, second, several = Outer(config, 0), Outer(config, 1, extra=7), AnyNumber(1, 2)
    assert constructed_with(first) == {"config": config, "number": 0}
    assert constructed_with(second) == {"config": config, "number": 1, "extra": 7}
    assert constructed_with(first.inner) == {"width": 3, "eps": 1e-5}
    assert constructed_with(several) is None
    assert constructed_with(Inner(2)) is None  # not while arguments were noted
    assert {id(other) for other, _ in built_like(first)} == {id(first), id(second)}


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    def forward(self, x):
        if self.training:
            raise NotImplementedError("not supported in training")
        return self.infer(x), self.choose(x)

    @torch.no_grad()
    def infer(self, x):
        return x @ self.weight

    @torch.no_grad()
    def choose(self, x):
        return (x @ self.weight).topk(2).indices

    @torch.no_grad()
    def _init_weights(self, x):
        return x


class Indexer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4))

    @torch.no_grad()
    def forward(self, x):
        return (x @ self.weight)[..., :2]


def test_a_loop_without_gradients_is_replaced_and_said():
    model = nn.ModuleList([Experts(), Indexer()]).eval()
    x = torch.randn(3, 4, requires_grad=True)
    assert not model[0](x)[0].requires_grad
    allow_gradients(model)
    assert replaced(model) == ["Experts.forward refuses training mode: read in evaluation mode here"]
    out, chosen = model[0](x)
    out.sum().backward()
    assert torch.equal(model[0].weight.grad, x.detach().sum(0)[:, None].expand(4, 4))
    assert chosen.shape == (3, 2)
    assert not model[1](x).requires_grad  # it only chooses: nothing of the stream's width comes out
    assert with_gradients(Experts) == ["infer"]
    assert replaced(model)[0] == "Experts.infer runs under no_grad in evaluation: called with gradients here"
    allow_gradients(model)
    assert with_gradients(Experts) == ["infer"]


class _ForText(nn.Module):
    """Logits of ids: rows of a matrix."""

    config = types.SimpleNamespace(is_encoder_decoder=False)

    def __init__(self):
        super().__init__()
        self.rows = nn.Embedding(9, 9)

    def forward(self, input_ids, use_cache):
        return types.SimpleNamespace(logits=self.rows(input_ids))


class TextForCausalLM(_ForText):
    pass


class ImagesForConditionalGeneration(_ForText):
    """Expects of the language model's result what only images leave there."""

    def __init__(self):
        super().__init__()
        self.language = TextForCausalLM()

    def forward(self, input_ids, use_cache):
        out = self.language(input_ids, use_cache)
        return types.SimpleNamespace(logits=out.logits, image_outputs=out.image_outputs)


class WithoutLanguageModel(_ForText):
    def forward(self, input_ids, use_cache):
        return input_ids.image_outputs


def test_a_class_that_fails_on_text_alone_gives_way_to_its_language_model():
    model, ids = ImagesForConditionalGeneration(), torch.tensor([[1, 7, 3]])
    assert fails_on_text(model) == ""
    assert torch.equal(logits_of(model, ids), model.language.rows(ids))
    said = "ImagesForConditionalGeneration fails on text alone: its TextForCausalLM is called"
    assert fails_on_text(model) == said
    with pytest.raises(AttributeError, match="image_outputs"):
        logits_of(WithoutLanguageModel(), ids)
