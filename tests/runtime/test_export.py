"""Export of runs: what comes out is what was trained, and the rest is what it was."""

import shutil

import families
import handmade
import harness
import pytest
import ranks_export
import tiny
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from dayzero.runtime.errors import InputError
from dayzero.runtime.export import export, new_folder
from dayzero.runtime.headers import read_headers

IDS = torch.arange(11)[None] * 13


@pytest.fixture(scope="module", params=["lora", "full"])
def case(request, tmp_path_factory):
    """(mode, source checkpoint, run folder, logits of the trained model)"""
    folder = tmp_path_factory.mktemp(request.param)
    checkpoint = tiny.make("qwen3_moe", folder / "source", max_shard_size="40KB")
    package = handmade.write(checkpoint, folder / "package")
    logits = harness.run(ranks_export.train, 2, package, folder / "run", request.param == "lora")[0]
    return request.param, checkpoint, folder / "run", logits


def reference(folder):
    model, loading = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True)
    assert not any(loading[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), loading
    return model


def close(got, want):
    return (got - want).norm() <= 1e-5 * want.norm()


@pytest.mark.slow
def test_a_whole_checkpoint_is_the_trained_model(case, tmp_path):
    mode, checkpoint, run, logits = case
    report = export(run, tmp_path / "out")
    headers = read_headers(checkpoint)
    assert read_headers(tmp_path / "out") == headers
    assert (report.kind, report.step, report.tensors) == ("merged" if mode == "lora" else "full", 2, len(headers))
    assert report.changed == (15 if mode == "lora" else len(headers))
    assert report.bytes == sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
    assert close(reference(tmp_path / "out")(IDS).logits[0], logits)
    assert not close(reference(checkpoint)(IDS).logits[0], logits)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    if mode == "lora":
        touched = {f"layers.{layer}.self_attn.{part}" for layer in range(3) for part in ("q", "k", "v", "o")}
        for name, header in headers.items():
            left, right = ((folder / header.file).read_bytes() for folder in (checkpoint, tmp_path / "out"))
            same = left[header.start : header.end] == right[header.start : header.end]
            adapted = any(f"{part}_proj.weight" in name for part in touched) or ".1.mlp." in name
            assert same != adapted, name


def test_an_adapter_alone_and_beside_its_base(case, tmp_path):
    mode, checkpoint, run, logits = case
    if mode == "full":
        for options, says in (({"adapter": True}, "--adapter"), ({"merged": False}, "--no-merge")):
            with pytest.raises(InputError, match=says):
                export(run, tmp_path / "out", **options)
        assert not list(tmp_path.iterdir())
        return
    alone = export(run, tmp_path / "alone", adapter=True)
    beside = export(run, tmp_path / "beside", merged=False)
    assert (alone.kind, alone.changed, alone.tensors) == ("adapter", 15, 30)
    assert (beside.kind, beside.changed, beside.tensors) == ("base+adapter", 15, 30 + len(read_headers(checkpoint)))
    for file in checkpoint.iterdir():
        assert (tmp_path / "beside" / file.name).read_bytes() == file.read_bytes()
    for base, adapter in ((checkpoint, tmp_path / "alone"), (tmp_path / "beside", tmp_path / "beside" / "adapter")):
        adapted = PeftModel.from_pretrained(reference(base), adapter)
        assert close(adapted(IDS).logits[0], logits)


def test_a_damaged_checkpoint_is_passed_over(case, tmp_path):
    _, _, run, _ = case
    shutil.copytree(run, tmp_path / "run")
    file = next((tmp_path / "run" / "checkpoints" / "step_00000002").glob("*.distcp"))
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    assert export(tmp_path / "run", tmp_path / "out").step == 1
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(InputError, match="no complete checkpoint"):
        export(tmp_path / "run", tmp_path / "other")


def test_nothing_is_overwritten_or_left_half_done(case, tmp_path):
    _, checkpoint, run, _ = case
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    with pytest.raises(InputError, match="not empty"):
        export(run, tmp_path / "out")
    with pytest.raises(InputError, match="not empty"):
        export(run, checkpoint)
    with pytest.raises(IsADirectoryError), new_folder(tmp_path / "half") as folder:
        folder.write_text("fails after the folder was made")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    (tmp_path / "empty").mkdir()
    assert export(run, tmp_path / "empty").step == 2


def test_another_source_is_refused(case, tmp_path):
    _, checkpoint, run, _ = case
    shutil.copytree(run, tmp_path / "run")
    other = tiny.make("qwen3_moe", tmp_path / "other", num_hidden_layers=2, tokenizer=False)
    record = (run / "run.json").read_text().replace(str(checkpoint), str(other))
    (tmp_path / "run" / "run.json").write_text(record)
    with pytest.raises(InputError, match="headers sha256"):
        export(tmp_path / "run", tmp_path / "out")
    for folder in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(InputError, match=r"run\.json|no such folder"):
            export(folder, tmp_path / "out")


def test_families_specify_alike(case):
    assert families.specify(case[1]) == handmade.specify(case[1])
