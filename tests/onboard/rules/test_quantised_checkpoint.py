"""A checkpoint whose experts are quantised, under another prefix than the reference's: found, loaded, exported."""

import json

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from dayzero.onboard.align.coverage import coverage_rung
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.inspect.classify import classify
from dayzero.onboard.specify import specify
from dayzero.runtime.hf_checkpoint import write_checkpoint
from dayzero.runtime.load import load_checkpoint
from dayzero.runtime.quantisation import FORMATS, decode, encode
from dayzero.runtime.weights import Cast, Decoded

SIZES = {"hidden_size": 64, "intermediate_size": 96}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """(folder, what the experts' weights stand for, specification)."""
    folder = tiny.make("mixtral", tmp_path_factory.mktemp("quantised") / "source", dtype=torch.bfloat16, **SIZES)
    tensors, stored, values = load_file(folder / "model.safetensors"), {}, {}
    for name, tensor in tensors.items():
        name = f"language_model.{name}"
        if ".experts." not in name:
            stored[name] = tensor
            continue
        rows, columns = tensor.shape
        like = {
            "packed": torch.zeros(rows, columns // 2, dtype=torch.uint8),
            "scale": torch.zeros(rows, columns // 32, dtype=torch.uint8),
        }
        parts, _ = encode(FORMATS["mxfp4_packed"], tensor.float(), like)
        values[name] = decode(FORMATS["mxfp4_packed"], parts)
        stored |= {f"{name}_{role}": part for role, part in parts.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})
    checkpoint = read_checkpoint(folder)
    config = json.loads((folder / "config.json").read_text())
    return checkpoint, values, specify(config, checkpoint.identity(), "quantised", headers=checkpoint.headers)


@pytest.mark.slow
def test_experts_are_decoded(made):
    checkpoint, values, specification = made
    rules = [rule.build() for rule in specification.spec.rules]
    decoded = {
        rule.parameter
        for rule in rules
        if any(isinstance(leaf, Decoded) for leaf, _, _ in rule.source.leaves({"layer": 0}))
    }
    assert decoded == {"layers.{layer}.ffn.experts.gate_up", "layers.{layer}.ffn.experts.down"}
    down = next(rule for rule in rules if rule.parameter.endswith("experts.down"))
    assert isinstance(down.source.part, Cast)  # type: ignore[attr-defined]
    model = specification.spec.build()
    load_checkpoint(model, rules, checkpoint.path, checkpoint.headers)
    name = "language_model.model.layers.1.block_sparse_moe.experts.{}.{}.weight"
    want = torch.stack([values[name.format(e, "w2")] for e in range(len(model.layers[1].ffn.experts.down))])
    assert torch.equal(model.layers[1].ffn.experts.down, want)


def test_in_and_out_changes_nothing(made, tmp_path):
    checkpoint, _, specification = made
    rung, hashes = coverage_rung(checkpoint, classify(checkpoint), specification.spec)
    assert "changed" not in str(rung)
    rules = [rule.build() for rule in specification.spec.rules]
    model = specification.spec.build()
    load_checkpoint(model, rules, checkpoint.path, checkpoint.headers, hashes=hashes)
    trained = [name for name, _ in model.named_parameters()]
    written = write_checkpoint(tmp_path, checkpoint.path, rules, trained, model.get_parameter, lambda name, cost: None)
    assert written == checkpoint.headers.keys()
    assert (tmp_path / "model.safetensors").read_bytes() == (checkpoint.path / "model.safetensors").read_bytes()
