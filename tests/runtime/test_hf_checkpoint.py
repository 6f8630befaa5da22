"""Parameters back into the checkpoint's own files: bit-identical where untouched, loadable where trained."""

import json

import families
import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import read_headers
from dayzero.runtime.hf_checkpoint import write_checkpoint
from dayzero.runtime.safetensors_reader import SafetensorsReader

FAMILIES = ["llama", "mixtral", "qwen3_moe", "olmoe"]
IDS = torch.arange(11)[None] * 13


@pytest.fixture(scope="module", params=[(family, dtype) for family in FAMILIES for dtype in ("float32", "bfloat16")])
def case(request, tmp_path_factory):
    family, dtype = request.param
    folder = tmp_path_factory.mktemp(family)
    checkpoint = tiny.make(family, folder / "source", dtype=getattr(torch, dtype), max_shard_size="40KB")
    return checkpoint, families.specify(checkpoint)


def logits(model, spec):
    with torch.no_grad():
        return model(IDS[0], torch.tensor([0, IDS.shape[1]]))


def raw(folder):
    """The bytes of every tensor, and the headers."""
    headers = read_headers(folder)
    return headers, {name: (folder / h.file).read_bytes()[h.start : h.end] for name, h in headers.items()}


def test_import_then_export_is_bit_identical(case, tmp_path):
    checkpoint, spec = case
    model = families.load(checkpoint, spec)
    rules = [rule.build() for rule in spec.rules]
    trained = [name for name, _ in model.named_parameters()]
    written = write_checkpoint(tmp_path, checkpoint, rules, trained, model.get_parameter)
    assert written == set(read_headers(checkpoint))
    assert raw(tmp_path) == raw(checkpoint)
    for path in checkpoint.iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes(), path.name
    assert len(list(checkpoint.glob("*.safetensors"))) > 2
    assert {path.name for path in tmp_path.iterdir()} == {path.name for path in checkpoint.iterdir()}


def test_trained_weights_load_in_transformers(case, tmp_path):
    checkpoint, spec = case
    model = families.load(checkpoint, spec)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.05 * noise.to(parameter.dtype))
    rules = [rule.build() for rule in spec.rules]
    trained = dict(model.named_parameters())
    write_checkpoint(tmp_path, checkpoint, rules, trained, trained.__getitem__)
    reference, loading = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    want = reference(IDS).logits[0]
    assert (logits(model.float(), spec) - want).norm() <= 1e-5 * want.norm()
    before = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)(IDS).logits[0]
    assert (before - want).norm() > 1e-2 * want.norm()


def test_only_trained_tensors_change(case, tmp_path):
    checkpoint, spec = case
    model = families.load(checkpoint, spec)
    name = "layers.1.mixer.key.weight"
    rules = [rule.build() for rule in spec.rules]
    written = write_checkpoint(tmp_path, checkpoint, rules, [name], lambda name: model.get_parameter(name).float() + 1)
    assert written == {"model.layers.1.self_attn.k_proj.weight"}
    headers, before = raw(checkpoint)
    after_headers, after = raw(tmp_path)
    assert after_headers == headers
    assert {tensor for tensor in before if before[tensor] != after[tensor]} == written
    got = SafetensorsReader(tmp_path).read(*written)
    assert torch.equal(got, (SafetensorsReader(checkpoint).read(*written).float() + 1).to(got.dtype))


@pytest.fixture
def llama(tmp_path):
    checkpoint = tiny.make("llama", tmp_path / "source", tie_word_embeddings=True, tokenizer=False)
    return checkpoint, families.specify(checkpoint)


def test_what_is_not_weights_is_copied(llama, tmp_path):
    checkpoint, spec = llama
    for name in ("LICENSE", "modeling_x.py", "chat_template.jinja", "pytorch_model.bin", ".gitattributes"):
        (checkpoint / name).write_text(name)
    (checkpoint / "pytorch_model.bin.index.json").write_text("{}")
    (checkpoint / "extra.safetensors").write_bytes(b"")
    (checkpoint / "additional_chat_templates").mkdir()
    (checkpoint / "additional_chat_templates" / "rag.jinja").write_text("x")
    out = tmp_path / "out"
    out.mkdir()
    assert write_checkpoint(out, checkpoint, [rule.build() for rule in spec.rules], [], {}.__getitem__) == set()
    assert {path.name for path in out.iterdir()} == {
        "LICENSE",
        "additional_chat_templates",
        "chat_template.jinja",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_x.py",
    }


def test_a_stored_copy_of_a_tied_head_follows_the_embedding(llama, tmp_path):
    checkpoint, spec = llama
    tensors = load_file(checkpoint / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    tensors |= {"lm_head.weight": embedding.clone(), "mtp.embed.weight": embedding + 1}
    save_file(tensors, checkpoint / "model.safetensors", metadata={"format": "pt"})
    out = tmp_path / "out"
    out.mkdir()
    rules = [rule.build() for rule in spec.rules]
    written = write_checkpoint(out, checkpoint, rules, ["embed.weight"], lambda _: embedding * 2)
    assert written == {"model.embed_tokens.weight", "lm_head.weight"}
    after = load_file(out / "model.safetensors")
    assert torch.equal(after["lm_head.weight"], embedding * 2)
    assert torch.equal(after["mtp.embed.weight"], embedding + 1)


@pytest.mark.parametrize(
    ("dtype", "value", "says"),
    [
        (torch.float16, torch.full((40,), 1e6), ["model.norm.weight", "40 values", "not finite as F16", "0 NaN"]),
        (torch.float32, torch.full((40,), torch.nan), ["model.norm.weight", "40 NaN"]),
        (torch.float32, torch.zeros(39), ["norm.weight", "[39]", "[40]"]),
        (torch.int8, torch.zeros(40), ["model.norm.weight", "I8", "F64, F32, F16, BF16"]),
    ],
)
def test_values_that_cannot_be_written(llama, tmp_path, dtype, value, says):
    checkpoint, spec = llama
    tensors = load_file(checkpoint / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(dtype)
    save_file(tensors, checkpoint / "model.safetensors")
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(InputError) as error:
        write_checkpoint(out, checkpoint, [rule.build() for rule in spec.rules], ["norm.weight"], lambda _: value)
    assert all(part in str(error.value) for part in says), str(error.value)


def test_a_parameter_without_a_rule(llama, tmp_path):
    checkpoint, spec = llama
    with pytest.raises(InputError, match="no rule"):
        write_checkpoint(tmp_path, checkpoint, [rule.build() for rule in spec.rules[1:]], ["embed.weight"], {}.get)


def test_index_is_the_source_s(case, tmp_path):
    checkpoint, spec = case
    write_checkpoint(tmp_path, checkpoint, [rule.build() for rule in spec.rules], [], {}.__getitem__)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]
    assert {name: header.file for name, header in read_headers(tmp_path).items()} == index
