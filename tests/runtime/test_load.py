import json
import shutil
from pathlib import Path

import harness
import pytest
import ranks_load
import ranks_train
import torch
from safetensors.torch import load_file, save_file

from dayzero.runtime.content_hash import content_hash, hashed_dtype, hex_of
from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import read_headers
from dayzero.runtime.load import check_same_checkpoint, load_checkpoint, load_random, write_exactly
from dayzero.runtime.package import load_package
from dayzero.runtime.precision import keep_parameters, stored_dtypes
from dayzero.runtime.safetensors_reader import SafetensorsReader
from dayzero.runtime.weights import Rule, Stored, bind, whole


@pytest.fixture(scope="module")
def package(tiny_run):
    return load_package(tiny_run.package)


def load(package, *, model=None, rules=None, folder=None, **options):
    folder = folder or package.checkpoint
    model = model or package.build()
    return load_checkpoint(model, rules or package.rules, folder, read_headers(folder), **options)


def test_reads_every_byte_once(package):
    model = package.build()
    assert load(package, model=model) == package.spec.checkpoint.bytes
    stored = load_file(package.checkpoint / "model.safetensors")
    assert torch.equal(model.embed.weight, stored["model.embed_tokens.weight"])
    gate, up = (stored[f"model.layers.1.block_sparse_moe.experts.5.{name}.weight"] for name in ("w1", "w3"))
    assert torch.equal(model.layers[1].ffn.experts.gate_up[5], torch.cat((gate, up)))


def test_a_parameter_that_no_rule_makes(package):
    rules = [rule for rule in package.rules if "ffn_norm" not in rule.parameter]
    with pytest.raises(InputError, match=r"layers\.0\.ffn_norm\.weight\n.*no rule makes it, nor 1 others"):
        load(package, rules=rules)
    names = [f"layers.{layer}.ffn_norm.weight" for layer in range(2)]
    assert load(package, rules=rules, elsewhere=names) < package.spec.checkpoint.bytes


def test_a_rule_without_a_parameter(package):
    with pytest.raises(InputError, match=r"ghost\.weight"):
        load(package, rules=[*package.rules, Rule("ghost.weight", Stored("ghost"))])


def test_a_tensor_that_is_missing_or_of_another_shape(package, tmp_path):
    tensors = load_file(package.checkpoint / "model.safetensors")
    tensors["model.norm.weight"] = torch.ones(39)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"(?s)model\.norm\.weight.*\[39\].*\[40\]"):
        load(package, folder=tmp_path)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"model\.norm\.weight\n.*no such tensor"):
        load(package, folder=tmp_path)


def test_a_value_that_the_parameter_cannot_hold():
    write_exactly(torch.empty(3), torch.tensor([1.5, -2.0, 3.0], dtype=torch.bfloat16), "here")
    with pytest.raises(InputError, match=r"here\n.*torch\.float64 values that torch\.float32 cannot hold"):
        write_exactly(torch.empty(1), torch.tensor([0.1], dtype=torch.float64), "here")
    with pytest.raises(InputError, match="2 NaN values"):
        write_exactly(torch.empty(3), torch.tensor([1.0, torch.nan, torch.nan]), "here")


def test_another_checkpoint_is_refused(package):
    headers = read_headers(package.checkpoint)
    check_same_checkpoint(package.checkpoint, headers, package.spec.checkpoint)
    headers["lm_head.weight"] = headers["lm_head.weight"]._replace(dtype="BF16")
    with pytest.raises(InputError, match="--checkpoint"):
        check_same_checkpoint(package.checkpoint, headers, package.spec.checkpoint)


def test_frozen_parameters_keep_the_dtype_of_the_checkpoint(package):
    headers = {name: header._replace(dtype="BF16") for name, header in read_headers(package.checkpoint).items()}
    headers["model.norm.weight"] = headers["model.norm.weight"]._replace(dtype="F32")
    stored = stored_dtypes(package.rules, headers)
    with torch.device("meta"):
        model = package.build()
    model.requires_grad_(False)
    model.head.weight.requires_grad_(True)
    keep_parameters(model, "bf16", stored)
    assert (model.embed.weight.dtype, model.layers[0].ffn.experts.down.dtype) == (torch.bfloat16, torch.bfloat16)
    assert (model.norm.weight.dtype, model.head.weight.dtype) == (torch.float32, torch.float32)
    keep_parameters(model, "fp32", stored)
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}


@pytest.fixture(scope="module")
def hashes(package):
    """Of every parameter, as it is in the checkpoint."""
    shapes = {name: header.shape for name, header in read_headers(package.checkpoint).items()}
    reader, found = SafetensorsReader(package.checkpoint), {}
    for parameter, rule in bind(package.rules).items():
        value = rule.read(reader, shapes)
        shape = tuple(value.shape)
        found[parameter] = hex_of(content_hash(value, shape, whole(shape), hashed_dtype(value.dtype)))
    return found


@pytest.fixture(scope="module")
def changed(package, tmp_path_factory):
    """The checkpoint with one bit of the last value of one expert's matrix turned: the same headers."""
    folder = Path(shutil.copytree(package.checkpoint, tmp_path_factory.mktemp("changed") / "checkpoint"))
    header = read_headers(folder)["model.layers.1.block_sparse_moe.experts.5.w3.weight"]
    with (folder / header.file).open("r+b") as stream:
        stream.seek(header.end - 4)
        (byte,) = stream.read(1)
        stream.seek(header.end - 4)
        stream.write(bytes([byte ^ 1]))
    return folder


MESSAGE = (
    r"(?s)checkpoint: layers\.1\.ffn\.experts\.gate_up\n  found     content hash [0-9a-f]{16}, of .*experts\.0\.w1"
    r".*and 9 more\n  expected  [0-9a-f]{16}.*\n  The checkpoint's bytes are not those that were proven\."
)


def test_bytes_that_changed_since_they_were_proven(package, hashes, changed):
    load(package, hashes=hashes)
    load(package, folder=changed)  # the headers are the same: nothing else can tell
    with pytest.raises(InputError, match=MESSAGE):
        load(package, folder=changed, hashes=hashes)


def test_the_same_content_in_other_files_and_dtypes(package, hashes, tmp_path):
    tensors = load_file(package.checkpoint / "model.safetensors")
    half = dict.fromkeys(list(tensors)[::2])
    save_file({name: tensors[name] for name in half}, tmp_path / "model-00001-of-00002.safetensors")
    rest = {name: tensor for name, tensor in tensors.items() if name not in half}
    save_file(rest, tmp_path / "model-00002-of-00002.safetensors")
    files = {name: f"model-0000{1 if name in half else 2}-of-00002.safetensors" for name in tensors}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": files}))
    load(package, folder=tmp_path, model=package.build().double(), hashes=hashes)


def test_two_parameters_that_changed_places(package, hashes):
    one, other = "layers.0.mixer.key.weight", "layers.0.mixer.value.weight"
    exchanged = {**hashes, one: hashes[other], other: hashes[one]}
    with pytest.raises(InputError, match=r"layers\.0\.mixer\.key\.weight, and 1 other parameters"):
        load(package, hashes=exchanged)


@pytest.mark.slow
@pytest.mark.parametrize("layout", [(1, 2, 1), (1, 2, 2), (2, 1, 1), (2, 1, 2)], ids=str)
def test_ranks_add_up(package, hashes, changed, layout):
    """Dense and expert parameters over every mesh of two; replicas count twice. All ranks say the same."""
    sound, broken = (
        harness.run(ranks_load.load, 2, package.folder, layout, folder, hashes)
        for folder in (package.checkpoint, changed)
    )
    assert sound == ["", ""]
    assert broken[0] == broken[1]
    assert "layers.1.ffn.experts.gate_up\n" in broken[0]
    assert "not those that were proven" in broken[0]


def test_random_weights_do_not_depend_on_the_mesh(package):
    with torch.device("meta"):
        model, fresh = package.build(), package.build()
    model.to_empty(device="cpu")
    load_random(model, fresh, 0.1, seed=5)
    want = {name: parameter.detach() for name, parameter in model.named_parameters()}
    assert 0.09 < float(want["layers.0.mixer.query.weight"].std()) < 0.11
    assert not torch.equal(want["layers.0.mixer.query.weight"], want["layers.1.mixer.query.weight"])
    for got in harness.run(ranks_train.random_weights, 2, package.folder, (1, 2, 2)):
        assert all(torch.equal(got[name], want[name]) for name in want)
