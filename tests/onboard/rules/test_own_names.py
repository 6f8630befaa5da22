"""Files that transformers reads and would not write so: other names, experts in one tensor."""

import json
from unittest import mock

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from zoo import families
from zoo.conformance import write_checkpoint

from dayzero.onboard import specify
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.oracle.reference import build, on_disk, redraw
from dayzero.onboard.rules.own_names import as_held, as_read, whichever_is_there
from dayzero.onboard.specify_checkpoint import specify_checkpoint
from dayzero.runtime.load import load_checkpoint
from dayzero.runtime.quantisation import FORMATS, decode, encode
from dayzero.runtime.spec import RuleSpec, SourceSpec
from dayzero.runtime.weights import Concat, Stack, Stored

IDS = torch.arange(3, 27)[None]


@pytest.fixture(autouse=True)
def only_present_values():
    """Config fields are not varied here: that is tested elsewhere, and takes most of the time."""
    with mock.patch.object(specify, "intervene", return_value=[]):
        yield


def loaded(folder):
    """(specification, our model with the checkpoint's weights)."""
    checkpoint = read_checkpoint(folder)
    specification, ledger = specify_checkpoint(checkpoint, "x", {}, lambda line: None)
    assert ledger.unaccounted == []
    model = specification.spec.build()
    rules = [rule.build() for rule in specification.spec.rules]
    load_checkpoint(model, rules, folder, checkpoint.headers)
    return specification, model


def assert_same_logits(model, reference):
    with torch.no_grad():
        got, want = model(IDS[0], torch.tensor([0, IDS.shape[1]])), reference(IDS).logits[0]
    assert (got - want).norm() <= 1e-4 * want.norm()


def published(folder, change):
    """The checkpoint under other names, in other layouts: change(tensors, config)."""
    file = folder / "model.safetensors"
    tensors = change(load_file(file), json.loads((folder / "config.json").read_text()))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    return folder


def experts_in_one(tensors, config):
    """`experts.gate_up_proj` [E, 2F, H] and `experts.down_proj` [E, H, F] for experts one by one."""
    made = {name: tensor for name, tensor in tensors.items() if ".experts." not in name}
    bases = {name.split(".experts.")[0] + ".experts." for name in tensors if ".experts." in name}
    for base in bases:
        count = len({name.removeprefix(base).split(".")[0] for name in tensors if name.startswith(base)})
        each = [{w: tensors[f"{base}{e}.{w}_proj.weight"] for w in ("gate", "up", "down")} for e in range(count)]
        made[f"{base}gate_up_proj"] = torch.stack([torch.cat((one["gate"], one["up"])) for one in each])
        made[f"{base}down_proj"] = torch.stack([one["down"] for one in each])
    return made


def a_name_of_the_first_layer(tensors, config):
    """transformers calls the dense layer as it calls the sparse ones, the published files do not."""
    return {name.replace("layers.0.block_sparse_moe.", "layers.0.mlp."): t for name, t in tensors.items()}


def names_without_the_model(tensors, config):
    """Names that transformers reads and cannot tell from others when it writes."""
    plain = {
        "model.embed_tokens.weight": "embed.weight",
        "model.hc_head.hc_": "hc_head_",
        ".attn.norm.": ".attn.kv_norm.",
    }
    made = {}
    for name, tensor in tensors.items():
        for old, new in plain.items():
            name = name.replace(old, new)
        made[name.removeprefix("model.")] = tensor
    return made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "change", "example"),
    [
        ("qwen3_5_moe", experts_in_one, "layers.0.mlp.experts.gate_up_proj"),
        ("kimi_linear", a_name_of_the_first_layer, "layers.0.mlp.gate_proj.weight"),
        ("deepseek_v4", names_without_the_model, "hc_head_base"),
    ],
)
def test_published_otherwise_than_transformers_writes(family, change, example, tmp_path):
    folder = published(write_checkpoint(family, tmp_path / family), change)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    specification, model = loaded(folder)
    names = {name for rule in specification.spec.rules for name in _names(rule)}
    assert any(name.endswith(example) for name in names)
    assert_same_logits(model, reference)


def _names(rule):
    built = rule.build()
    return [name for _, index in built.each() for name in built.source.names(index)]


@pytest.mark.slow
def test_blocks_are_the_other_way_round_than_the_plain_tensor(tmp_path):
    """Square matrices: no shape tells that codes are by output rows, and the plain tensor by input rows."""
    small = {**families.config("gpt_oss"), "hidden_size": 64, "intermediate_size": 64}
    with mock.patch.object(families, "config", return_value=small):
        folder = write_checkpoint("gpt_oss", tmp_path / "plain")
    values, made = load_file(folder / "model.safetensors"), {}
    for name, tensor in values.items():
        if tensor.ndim < 3:
            made[name] = tensor
            continue
        experts, columns, rows = tensor.shape
        like = {
            "blocks": torch.zeros(experts, rows, columns // 32, 16, dtype=torch.uint8),
            "scales": torch.zeros(experts, rows, columns // 32, dtype=torch.uint8),
        }
        parts, _ = encode(FORMATS["mxfp4_blocks"], tensor.mT, like)
        made |= {f"{name}_{role}": part for role, part in parts.items()}
        values[name] = decode(FORMATS["mxfp4_blocks"], parts).mT.contiguous()
    assert any(tensor.ndim == 3 and tensor.shape[1] == tensor.shape[2] for tensor in values.values())
    save_file(values, folder / "model.safetensors", metadata={"format": "pt"})
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    _, model = loaded(folder)
    assert_same_logits(model, reference)


def test_what_the_reference_holds_otherwise():
    reference, _ = build(families.config("qwen3_5_moe"))
    redraw(reference, torch.Generator().manual_seed(0))
    stored = on_disk(reference)
    held = as_held(reference, stored)
    apart, one = ({name for name in tensors if ".layers.1.mlp.experts" in f".{name}"} for tensors in (stored, held))
    assert len(apart) == 3 * 15
    assert sorted(name.rsplit(".", 1)[1] for name in one) == ["down_proj", "gate_up_proj"]
    assert held.keys() - stored.keys() <= reference.state_dict().keys()
    assert sum(tensor.numel() for tensor in held.values()) == sum(tensor.numel() for tensor in stored.values())


def test_names_that_the_loader_takes_for_the_same():
    reference, _ = build(families.config("deepseek_v4"), device="meta")
    written, file = "model.layers.{layer}.attn.norm.weight", "layers.{layer}.attn.kv_norm.weight"
    rule = RuleSpec(parameter="layers.{layer}.n", source=SourceSpec.of(Stored(written)), ranges={"layer": (0, 3)})
    names = {file.format(layer=layer) for layer in range(3)}
    (made,) = as_read([rule], reference, names)
    assert made.build().source == Stored(file)
    assert as_read([rule], reference, {*names} - {file.format(layer=2)}) == [rule]  # of a layer it is missing
    also = {f"layers.{layer}.self_attn.kv_norm.weight" for layer in range(3)}
    assert as_read([rule], reference, names | also) == [rule]  # which of the two?


def test_the_one_that_is_there_is_taken_layer_by_layer():
    def rule(source, layers):
        return RuleSpec(parameter="layers.{layer}.w", source=SourceSpec.of(source), ranges={"layer": layers})

    apart = Stack("expert", 2, Concat(0, tuple(Stored(f"m.{{layer}}.e.{{expert}}.{n}") for n in "gu")))
    one = Stored("m.{layer}.gu")
    names = {f"x.m.{layer}.e.{e}.{n}" for layer in (0, 2) for e in (0, 1) for n in "gu"} | {"x.m.1.gu"}
    made = whichever_is_there([rule(apart, (0, 4))], [rule(one, (0, 4))], names)
    found = {layer: made_of.build().source for made_of in made for layer in range(*made_of.ranges["layer"])}
    assert found == {0: apart, 1: one, 2: apart, 3: apart}  # layer 3 has neither: settling the ledger says so
    (other,) = whichever_is_there([rule(apart, (0, 4))], [rule(one, (0, 4))], {f"m.{n}.gu" for n in range(3)})
    assert (other.build().source, other.ranges["layer"]) == (one, (0, 4))
