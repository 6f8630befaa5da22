"""What is wrong with the input is said in one message that names it; nothing is written."""

import json
import os
import pickle
import shutil
import sys
from pathlib import Path

import onboarded
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.utils import logging

from dayzero.onboard.cli import main
from dayzero.runtime.headers import read_headers

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


@pytest.fixture
def onboard(capsys, monkeypatch, tmp_path):
    """Runs the command in this process, in an empty folder: (exit code, standard output, standard error)."""
    threads, verbosity = torch.get_num_threads(), logging.get_verbosity()
    logging.set_verbosity_error()  # its handler holds the standard error of the test that came first
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["onboard", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    yield run
    logging.set_verbosity(verbosity)
    torch.set_num_threads(threads)


@pytest.fixture
def copy(tmp_path):
    """A copy of a tiny checkpoint that a test may damage."""

    def of(name):
        return Path(shutil.copytree(onboarded.checkpoint(name), tmp_path / "checkpoint"))

    return of


def listing(folder):
    return {path.relative_to(folder).as_posix(): path.lstat().st_mtime_ns for path in folder.rglob("*")}


def refused(onboard, checkpoint, *says, arguments=()):
    """The command ends with 2 and one message that holds every one of `says`; the disk is as before."""
    folder = checkpoint.parent
    before = listing(folder)
    code, out, err = onboard(checkpoint, *arguments)
    assert code == 2, out + err
    assert out == ""
    messages = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(messages) == 1, err
    assert err[err.index("error: ") :].count("\n") <= 4, err
    assert "Traceback" not in err
    for text in says:
        assert text in err, err
    after = listing(folder)
    after.pop("cwd", None), before.pop("cwd", None)  # a folder that came and went leaves its parent's time changed
    assert after == before
    return err


def edit(file, **changes):
    content = json.loads(file.read_text())
    content.update(changes)
    file.write_text(json.dumps({key: value for key, value in content.items() if value is not ...}))


# --- files ----------------------------------------------------------------------------------------------------------


def test_no_such_folder(onboard, tmp_path):
    refused(onboard, tmp_path / "nowhere", str(tmp_path / "nowhere"), "no such folder")


def test_a_file_instead_of_a_folder(onboard, copy):
    checkpoint = copy("llama")
    refused(onboard, checkpoint / WEIGHTS, WEIGHTS, "a file")


def test_a_missing_shard(onboard, copy):
    checkpoint = copy("llama, bfloat16 in shards")
    shard = sorted(checkpoint.glob("*.safetensors"))[2]
    shard.unlink()
    refused(onboard, checkpoint, shard.name, "no such file", INDEX)


def test_a_missing_single_file(onboard, copy):
    checkpoint = copy("llama")
    (checkpoint / WEIGHTS).unlink()
    refused(onboard, checkpoint, str(checkpoint), WEIGHTS)


@pytest.mark.parametrize("cut", [1, 1000, -9, -5])
@pytest.mark.parametrize("name", ["llama", "llama, bfloat16 in shards"])
def test_a_truncated_file(onboard, copy, name, cut):
    checkpoint = copy(name)
    file = sorted(checkpoint.glob("*.safetensors"))[0]
    content = file.read_bytes()
    file.write_bytes(content[:-cut] if cut > 0 else content[: -cut - 1])
    refused(onboard, checkpoint, file.name, "bytes")


HEADERS = {
    "not JSON": b"\x08\0\0\0\0\0\0\0{'oh': n",
    "no map": b"\x02\0\0\0\0\0\0\0[]",
    "empty": b"",
    "a number": b"\x08\0\0\0\0\0\0\0" + b"12345678",
    "not UTF-8": b"\x08\0\0\0\0\0\0\0" + b'{"\xff\xfe":1',
    "huge": b"\xff\xff\xff\xff\xff\xff\xff\x7f{}",
    "deep": (n := b"[" * 200_000) and len(n).to_bytes(8, "little") + n,
}


@pytest.mark.parametrize("header", HEADERS)
@pytest.mark.parametrize("indexed", [False, True])
def test_a_header_that_is_garbage(onboard, copy, header, indexed):
    checkpoint = copy("llama, bfloat16 in shards" if indexed else "llama")
    file = sorted(checkpoint.glob("*.safetensors"))[0]
    file.write_bytes(HEADERS[header])
    refused(onboard, checkpoint, file.name)


def with_header(file, entries):
    """The file with some header entries replaced and its tensors' bytes kept."""
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = {**json.loads(content[8 : 8 + length]), **entries}
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + length :])


@pytest.mark.parametrize(
    "entry",
    [
        {"data_offsets": [8, 4]},
        {"data_offsets": [-160, 0]},
        {"data_offsets": ["0", "160"]},
        {"data_offsets": [0]},
        {"data_offsets": None},
        {"shape": [41]},
        {"shape": [-40]},
        {"shape": ["40"]},
        {"shape": [40.0]},
        {"shape": [True, 40]},
        {"shape": 40},
        {"dtype": "F33"},
        {"dtype": ["F32"]},
        {"dtype": None},
        "model.norm.weight",
        None,
    ],
)
@pytest.mark.parametrize("indexed", [False, True])
def test_a_header_entry_that_makes_no_sense(onboard, copy, entry, indexed):
    checkpoint = copy("llama")
    if indexed:
        names = list(load_file(checkpoint / WEIGHTS))
        (checkpoint / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, WEIGHTS)}))
    header = read_headers(checkpoint)["model.norm.weight"]
    first = min(other.start for other in read_headers(checkpoint).values())
    good = {"dtype": "F32", "shape": [40], "data_offsets": [header.start - first, header.end - first]}
    with_header(checkpoint / WEIGHTS, {"model.norm.weight": {**good, **entry} if isinstance(entry, dict) else entry})
    refused(onboard, checkpoint, WEIGHTS)


@pytest.mark.parametrize("where", ["../elsewhere.safetensors", "/etc/passwd", "..", ".", "", "sub/x.safetensors", 7])
def test_an_index_that_points_out_of_the_folder(onboard, copy, where):
    checkpoint = copy("llama, bfloat16 in shards")
    index = json.loads((checkpoint / INDEX).read_text())
    index["weight_map"]["model.norm.weight"] = where
    (checkpoint / INDEX).write_text(json.dumps(index))
    refused(onboard, checkpoint, INDEX, "model.norm.weight", repr(where))


@pytest.mark.parametrize(
    "content", ["", "[]", "{}", '{"weight_map": []}', '{"weight_map": {}}', "{", '{"weight_map": 1}']
)
def test_an_index_that_is_none(onboard, copy, content):
    checkpoint = copy("llama, bfloat16 in shards")
    (checkpoint / INDEX).write_text(content)
    refused(onboard, checkpoint, INDEX)


def test_a_shard_that_links_out_of_the_folder(onboard, copy, tmp_path):
    checkpoint = copy("llama, bfloat16 in shards")
    shard = sorted(checkpoint.glob("*.safetensors"))[0]
    secret = tmp_path / "secret.safetensors"
    shard.rename(secret)
    shard.symlink_to(secret)
    refused(onboard, checkpoint, shard.name, "link")


def test_the_cache_of_the_hub_links_its_files_and_is_read(onboard, copy, tmp_path):
    """huggingface_hub keeps snapshots/<revision>/<file> as links to ../../blobs/<hash>."""
    checkpoint = copy("llama")
    snapshot = tmp_path / "models--org--tiny" / "snapshots" / "0123abcd"
    blobs = tmp_path / "models--org--tiny" / "blobs"
    snapshot.mkdir(parents=True), blobs.mkdir()
    for number, file in enumerate(sorted(checkpoint.iterdir())):
        (blobs / f"{number:040x}").write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / f"{number:040x}")
    code, out, err = onboard("inspect", snapshot, "--json")
    assert code == 0, err
    assert json.loads(out)["tensors"] == len(load_file(checkpoint / WEIGHTS))


class _Runs:
    def __reduce__(self):
        return os.mkdir, ("pickle_was_opened",)


@pytest.mark.parametrize("file", ["pytorch_model.bin", "consolidated.00.pth", "model.pt"])
def test_pickled_weights_alone_are_refused_and_never_opened(onboard, copy, file):
    checkpoint = copy("llama")
    (checkpoint / WEIGHTS).unlink()
    (checkpoint / file).write_bytes(pickle.dumps(_Runs()))
    refused(onboard, checkpoint, file, "pickle")
    assert not list(checkpoint.parent.rglob("pickle_was_opened"))


# --- config.json ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "no such file"),
        (b"", "not JSON"),
        (b"{", "not JSON"),
        (b"[1, 2]", "list"),
        (b'"llama"', "str"),
        (b"null", ""),
        (b"\xff\xfe{", "not JSON"),
        (b"[" * 100_000, "not JSON"),
        (b'{"hidden_size": ' + b"9" * 5000 + b"}", "not JSON"),
        (b'{"hidden_size": 1' + b"0" * 400 + b"}", "beyond 64 bits"),
        (b'{"rms_norm_eps": 1e999}', "too large"),
        (b'{"rms_norm_eps": NaN}', "NaN"),
        (b'{"hidden_size": 8, "hidden_size": 16}', "twice"),
        (b'{"a":' * 20 + b"1" + b"}" * 20, "in one another"),
        (b'{"a": "\\ud800"}', "Unicode"),
    ],
)
def test_a_config_that_is_none(onboard, copy, content, says):
    checkpoint = copy("llama")
    (checkpoint / "config.json").unlink()
    if content is not None:
        (checkpoint / "config.json").write_bytes(content)
    refused(onboard, checkpoint, "config.json", says)


def test_a_broken_generation_config(onboard, copy):
    checkpoint = copy("llama")
    (checkpoint / "generation_config.json").write_text("[]")
    refused(onboard, checkpoint, "generation_config.json", "list")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "field", "value", "tensor"),
    [
        ("llama", "hidden_size", 48, "model.embed_tokens.weight"),
        pytest.param("llama", "hidden_size", 32, "model.embed_tokens.weight", marks=pytest.mark.slow),
        pytest.param("llama", "vocab_size", 308, "model.embed_tokens.weight", marks=pytest.mark.slow),
        pytest.param("llama", "intermediate_size", 64, "mlp.gate_proj.weight", marks=pytest.mark.slow),
        pytest.param("llama", "head_dim", 16, "self_attn.q_proj.weight", marks=pytest.mark.slow),
        ("llama", "num_attention_heads", 8, "self_attn.q_proj.weight"),
        pytest.param("llama", "num_key_value_heads", 1, "self_attn.k_proj.weight", marks=pytest.mark.slow),
        ("llama", "num_hidden_layers", 5, "model.layers.3.input_layernorm.weight"),
        pytest.param("mixtral", "num_local_experts", 8, "gate.weight", marks=pytest.mark.slow),
        pytest.param("mixtral", "num_local_experts", 4, "gate.weight", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "moe_intermediate_size", 48, "mlp.experts.0", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "mlp_only_layers", [2], "model.layers.1.mlp", marks=pytest.mark.slow),
    ],
)
def test_a_config_that_the_tensors_contradict(onboard, copy, family, field, value, tensor):
    checkpoint = copy(family)
    edit(checkpoint / "config.json", **{field: value})
    refused(onboard, checkpoint, tensor, f"{field}={value}" if field != "mlp_only_layers" else "config.json")


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_attention_heads": 0}, "zero"),
        ({"num_attention_heads": 6}, "attention heads (6)"),
        ({"num_attention_heads": "four"}, "num_attention_heads"),
        ({"hidden_size": -1}, "hidden size (-1)"),
        ({"hidden_size": 40.5}, "hidden_size"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"vocab_size": [307]}, "vocab_size"),
        ({"hidden_act": "swoosh"}, "swoosh"),
        ({"num_key_value_heads": 3}, "key/value heads"),
        ({"rope_parameters": {"rope_type": "unheard", "rope_theta": 1e4}}, "unheard"),
        ({"rope_parameters": 7}, "rope"),
        ({"rms_norm_eps": "tiny"}, "rms_norm_eps"),
    ],
)
def test_a_config_with_an_impossible_value(onboard, copy, changes, says):
    checkpoint = copy("llama")
    edit(checkpoint / "config.json", **changes)
    refused(onboard, checkpoint, "config.json", says)


# --- where to write -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["../x", "a b", "", "1x", "x/y", "x.y", "-x", "é", "x\n"])
def test_a_name_that_is_no_name(onboard, name):
    refused(onboard, onboarded.checkpoint("llama"), "--name", arguments=[f"--name={name}"])


def test_a_folder_of_that_name_that_is_not_ours(onboard, tmp_path):
    foreign = tmp_path / "out" / "mine"
    foreign.mkdir(parents=True)
    (foreign / "thesis.tex").write_text("years of work")
    before = listing(tmp_path / "out")
    refused(onboard, onboarded.checkpoint("llama"), str(foreign), arguments=["-o", tmp_path / "out", "--name", "mine"])
    assert listing(tmp_path / "out") == before


def test_a_file_of_that_name(onboard, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    arguments = ["-o", tmp_path / "out", "--name", "mine"]
    refused(onboard, onboarded.checkpoint("llama"), "mine", "a file", arguments=arguments)


def test_an_output_folder_that_is_a_file(onboard, tmp_path):
    (tmp_path / "out").write_text("x")
    refused(onboard, onboarded.checkpoint("llama"), str(tmp_path / "out"), arguments=["-o", tmp_path / "out"])


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_output_folder_that_cannot_be_written(onboard, tmp_path):
    (tmp_path / "out").mkdir(mode=0o500)
    refused(onboard, onboarded.checkpoint("llama"), str(tmp_path / "out"), arguments=["-o", tmp_path / "out"])


@pytest.mark.parametrize("decisions", ["[", "- a", "other: 1", "ignore_config: 3", "ignore_config: [a]"])
def test_decisions_that_cannot_be_read(onboard, tmp_path, decisions):
    package = Path(shutil.copytree(onboarded.get("llama").package, tmp_path / "out" / "mine", symlinks=True))
    (package / "decisions.yaml").write_text(decisions)
    before = listing(tmp_path / "out")
    arguments = ["-o", tmp_path / "out", "--name", "mine"]
    refused(onboard, onboarded.checkpoint("llama"), "decisions.yaml", arguments=arguments)
    assert listing(tmp_path / "out") == before


# --- what is beyond this tool: exit 1, everything that is open is listed, nothing is written ------------------------


def unproven(onboard, checkpoint, *says):
    before = listing(checkpoint.parent)
    code, out, err = onboard(checkpoint, "--json")
    assert code == 1, out + err
    assert "Traceback" not in err
    listed, last = out.rsplit("\n", 2)[:2]
    result = json.loads(last)
    assert (result["command"], result["ok"], result["verdict"]) == ("run", False, "UNPROVEN")
    assert listed.startswith(f"not onboarded: {len(result['unproven'])} ")
    for text in says:
        assert any(text in item["where"] + item["why"] for item in result["unproven"]), result
        assert text in listed
    after = listing(checkpoint.parent)
    after.pop("cwd"), before.pop("cwd")
    assert after == before
    return result["unproven"]


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}, "fp8"),
        pytest.param(
            {"quantization_config": {}, "compression_config": {"format": "int4"}},
            "compression_config",
            marks=pytest.mark.slow,
        ),
        ({"attention_multiplier": 0.0078125}, "attention_multiplier"),
        pytest.param({"logits_scaling": None}, "logits_scaling", marks=pytest.mark.slow),
        ({"rms_norm_eps": float("inf")}, "input_layernorm"),
    ],
)
def test_what_is_not_understood_is_listed(onboard, copy, changes, says):
    checkpoint = copy("llama")
    edit(checkpoint / "config.json", **changes)
    unproven(onboard, checkpoint, says)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"architectures": ["NovelForCausalLM"]}, "NovelForCausalLM"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "LlamaForSequenceClassification"),
        ({"architectures": ["AutoModelForCausalLM"]}, "AutoModelForCausalLM"),
        ({"architectures": ["torch"]}, "torch"),
        ({"architectures": ["LlamaModel"]}, "LlamaModel"),
        ({"model_type": "novel", "architectures": []}, "novel"),
        ({"model_type": "novel", "architectures": ["NovelForCausalLM"]}, "novel"),
        ({"model_type": ..., "architectures": ...}, "model_type"),
        ({"model_type": ["llama"]}, "model_type"),
    ],
)
def test_what_no_reference_is_known_for_is_unverified(onboard, copy, changes, says):
    """Rules make a package of it, which says in its first line that nothing was compared, and why L1 was not."""
    checkpoint = copy("llama")
    edit(checkpoint / "config.json", **changes)
    code, out, err = onboard(checkpoint, "--name", "mine", "--json")
    assert code == 1, out + err
    assert "Traceback" not in err
    result = json.loads(out.splitlines()[-1])
    assert (result["ok"], result["verdict"], result["rungs"]["L0"]["verdict"]) == (False, "UNVERIFIED", "PASS")
    assert says in result["rungs"]["L1"]["where"]
    assert (
        Path("generated", "mine", "REPORT.md")
        .read_text()
        .startswith("**UNVERIFIED: nothing of this model was compared")
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "lifted"),
    [
        ({"architectures": ...}, False),
        pytest.param({"architectures": []}, False, marks=pytest.mark.slow),
        pytest.param({"model_type": ...}, False, marks=pytest.mark.slow),
        pytest.param({"model_type": "novel"}, False, marks=pytest.mark.slow),
        ({"hidden_act": "quick_gelu"}, True),
    ],
)
def test_what_is_understood_all_the_same(onboard, copy, changes, lifted):
    """One of the two names is enough; an activation that no block has is lifted from the reference, and said to be."""
    checkpoint = copy("llama")
    edit(checkpoint / "config.json", **changes)
    code, out, err = onboard(checkpoint, "--name", "mine", "--json")
    assert code == 0, out + err
    assert json.loads(out.splitlines()[-1])["verdict"] == "PASS"
    package = Path("generated", "mine")
    assert (package / "lifted.py").exists() is lifted
    assert ("Lifted, " in (package / "REPORT.md").read_text()) is lifted


@pytest.mark.parametrize(
    "architectures", ["LlamaForCausalLM", [1], {"a": 1}, 7, [["LlamaForCausalLM"]], [None], ["a b"]]
)
def test_architectures_that_are_no_names(onboard, copy, architectures):
    checkpoint = copy("llama")
    edit(checkpoint / "config.json", architectures=architectures)
    refused(onboard, checkpoint, "config.json: architectures", json.dumps(architectures)[:4].strip('"'))


@pytest.mark.parametrize("quantization", ["fp8", [1], 7])
def test_a_quantisation_that_is_no_object(onboard, copy, quantization):
    checkpoint = copy("llama")
    edit(checkpoint / "config.json", quantization_config=quantization)
    refused(onboard, checkpoint, "config.json: quantization_config")


def test_a_tensor_that_nothing_uses(onboard, copy):
    checkpoint = copy("llama")
    tensors = load_file(checkpoint / WEIGHTS)
    tensors["model.layers.1.self_attn.gate_proj.weight"] = torch.ones(3, 5)
    tensors["model.extra.0.proj.weight"] = torch.ones(3, 5)
    save_file(tensors, checkpoint / WEIGHTS, metadata={"format": "pt"})
    found = unproven(onboard, checkpoint, "model.layers.1.self_attn.gate_proj.weight", "model.extra.0.proj.weight")
    assert len(found) == 2


def test_layers_that_the_config_does_not_count(onboard, copy):
    checkpoint = copy("llama")
    edit(checkpoint / "config.json", num_hidden_layers=2)
    found = unproven(onboard, checkpoint, "model.layers.2.mlp.down_proj.weight")
    assert {item["where"].split(".")[2] for item in found} == {"2"}
    assert len(found) == 9


@pytest.mark.slow
def test_experts_that_the_config_does_not_count(onboard, copy):
    """Sizes that fit as they are, but for two experts that no router row would reach."""
    checkpoint = copy("mixtral")
    tensors = load_file(checkpoint / WEIGHTS)
    for name in [name for name in tensors if "gate.weight" in name]:
        tensors[name] = tensors[name][:4].clone()
    save_file(tensors, checkpoint / WEIGHTS, metadata={"format": "pt"})
    edit(checkpoint / "config.json", num_local_experts=4)
    found = unproven(onboard, checkpoint, "model.layers.0.block_sparse_moe.experts.4.w1.weight")
    assert [item["where"].split(".")[-2] for item in found] == ["w1", "w2", "w3"]
    assert all(f": {3 * 2} tensors, " in item["why"] for item in found)


@pytest.mark.slow
def test_an_expert_that_is_missing(onboard, copy):
    checkpoint = copy("mixtral")
    tensors = load_file(checkpoint / WEIGHTS)
    del tensors["model.layers.1.block_sparse_moe.experts.5.w3.weight"]
    save_file(tensors, checkpoint / WEIGHTS, metadata={"format": "pt"})
    refused(onboard, checkpoint, "model.layers.1.block_sparse_moe.experts.5.w3.weight", "not in the checkpoint")


@pytest.mark.slow
def test_a_field_is_let_through_by_a_decision_with_its_reason(onboard, copy, tmp_path):
    checkpoint = copy("llama")
    edit(checkpoint / "config.json", house_style="plain")
    unproven(onboard, checkpoint, "house_style")
    arguments = (checkpoint, "-o", tmp_path / "out", "--name", "mine")
    edit(checkpoint / "config.json", house_style=...)
    assert onboard("generate", *arguments)[0] == 0
    edit(checkpoint / "config.json", house_style="plain")
    decisions = tmp_path / "out" / "mine" / "decisions.yaml"
    decisions.write_text("ignore_config:\n  house_style: only the cover page reads it\n")
    code, out, err = onboard("generate", *arguments)
    assert code == 0, out + err
    assert "only the cover page reads it" in (tmp_path / "out" / "mine" / "onboard.lock").read_text()
    assert decisions.read_text() == "ignore_config:\n  house_style: only the cover page reads it\n"
