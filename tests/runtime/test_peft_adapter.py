"""Adapters that PEFT loads: its keys, its config, the same logits."""

import json

import families
import pytest
import tiny
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import read_headers
from dayzero.runtime.lora import LoRALinear, apply_lora
from dayzero.runtime.peft_adapter import target_modules, without_place, write_adapter
from dayzero.runtime.weights import Concat, Rule, Stored, Transpose

IDS = torch.arange(11)[None] * 13


@pytest.mark.parametrize(
    ("family", "targets"),
    [
        ("llama", "auto"),
        ("llama", ["query", "layers.1.mixer.output"]),
        ("mixtral", "auto"),
        ("qwen3_moe", "auto"),
        ("qwen3_moe", ["ffn.gate"]),  # layer 1 is dense; its gate_proj is called as the experts' own
        ("olmoe", "auto"),
    ],
)
def test_loads_in_peft_with_the_same_logits(family, targets, tmp_path):
    checkpoint = tiny.make(family, tmp_path / "source", tokenizer=False)
    spec = families.specify(checkpoint)
    model = families.load(checkpoint, spec)
    generator = torch.Generator().manual_seed(0)
    names = apply_lora(model, 4, 6.0, targets=targets, generator=generator)
    adapters = {}
    for name in names:
        module = model.get_submodule(name)
        assert isinstance(module, LoRALinear)
        torch.nn.init.normal_(module.lora_b, std=0.1, generator=generator)
        adapters[name] = (module.lora_a, module.lora_b)
    out = tmp_path / "adapter"
    out.mkdir()
    modules = write_adapter(out, checkpoint, [rule.build() for rule in spec.rules], adapters, 4, 6.0)
    assert len(modules) == len(names)

    reference = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    before = reference(IDS).logits[0]
    known = dict(reference.named_modules())
    for key in load_file(out / "adapter_model.safetensors"):
        assert key.removeprefix("base_model.model.").rsplit(".", 2)[0] in known
    adapted = PeftModel.from_pretrained(reference, out)
    loaded = [name for name, _ in adapted.named_parameters() if "lora_A" in name]
    assert len(loaded) == len(names)
    want = adapted(IDS).logits[0]
    got = model(IDS[0], torch.tensor([0, IDS.shape[1]]))
    assert (got - want).norm() <= 1e-5 * want.norm()
    assert (before - want).norm() > 1e-2 * want.norm()


def test_weights_side_by_side_share_a_and_split_b(tmp_path):
    save_file({"x.q.weight": torch.zeros(3, 5), "x.k.weight": torch.zeros(2, 5)}, tmp_path / "model.safetensors")
    a, b = torch.randn(4, 5), torch.randn(5, 4)
    rules = [Rule("qk.weight", Concat(0, (Stored("x.q.weight"), Stored("x.k.weight"))))]
    assert write_adapter(tmp_path, tmp_path, rules, {"qk": (a, b)}, 4, 8.0, 0.1) == ["x.q", "x.k"]
    tensors = load_file(tmp_path / "adapter_model.safetensors")
    assert torch.equal(tensors["base_model.model.x.q.lora_B.weight"], b[:3])
    assert torch.equal(tensors["base_model.model.x.k.lora_B.weight"], b[3:])
    assert torch.equal(tensors["base_model.model.x.k.lora_A.weight"], a)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["lora_dropout"]) == (4, 8.0, 0.1)


def test_what_peft_cannot_express(tmp_path):
    save_file({name: torch.zeros(3, 5) for name in ("x.weight", "y.weight")}, tmp_path / "model.safetensors")
    adapters = {"x": (torch.zeros(4, 3), torch.zeros(5, 4))}
    rules = [Rule("x.weight", Transpose(Stored("x.weight"))), Rule("y.weight", Stored("y.weight"))]
    with pytest.raises(InputError, match="Export merged"):
        write_adapter(tmp_path, tmp_path, rules, adapters, 4, 8.0)
    assert without_place(read_headers(tmp_path), rules, ["x", "y"]) == ["x"]


def test_target_modules_are_whole_paths_where_a_short_name_would_match_more():
    shapes = {f"layers.{layer}.{name}.weight": (3, 3) for layer in (0, 1) for name in ("q", "o")}
    assert target_modules(["layers.0.q", "layers.1.q"], shapes) == ["q"]
    assert target_modules(["layers.0.q", "layers.1.q", "layers.1.o"], shapes) == [
        "layers.0.q",
        "layers.1.o",
        "layers.1.q",
    ]
