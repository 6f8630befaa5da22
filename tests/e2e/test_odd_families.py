"""Families of unusual layers through training and export: adapters that PEFT loads, indexers with their own loss."""

import pytest
import torch
from examples import write_examples
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from zoo import trainable

from dayzero.runtime import launch
from dayzero.runtime.errors import InputError
from dayzero.runtime.export import export
from dayzero.runtime.job import prepare
from dayzero.runtime.metrics import read_metrics

pytestmark = pytest.mark.slow

SETTINGS = ["data.max_length=64", "data.tokens_per_rank=64", "log.tensorboard=false", "train.precision=fp32"]
SETTINGS += ["optimizer.lr=1e-2", "optimizer.warmup=1", "optimizer.clip=1e6", "train.steps=3"]
LINEARS = {
    "deepseek_v32": {"kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj", "gate_proj", "up_proj"},
    "recurrent_gemma": {"linear_x", "linear_y", "linear_out", "q_proj", "v_proj", "gate_proj", "down_proj"},
}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    data = write_examples(folder / "data.jsonl", 30, seed=0)
    packages = {}

    def package(family):
        if family not in packages:
            packages[family] = trainable.package(family, folder / family)
        return packages[family], data

    return package


def train(package, data, run, *settings):
    job = prepare(package, data=data, eval_data=data, run=run, world=1, overrides=[*SETTINGS, *settings])
    launch.run(job, 1)
    return run


@pytest.mark.parametrize("family", LINEARS)
def test_adapters_train_and_peft_loads_them(made, family, tmp_path):
    package, data = made(family)
    run = train(package, data, tmp_path / "run", "lora.rank=3", "checkpoint.every=1", "checkpoint.keep_best=1")
    records = [record["eval_loss"] for record in read_metrics(run) if "eval_loss" in record]
    assert records[-1] < records[0]
    report = export(run, tmp_path / "merged", best=True)
    assert report.step == 1 + min(range(3), key=lambda step: records[step + 1])
    last = export(run, tmp_path / "last")
    assert last.step == 3
    adapter = export(run, tmp_path / "adapter", adapter=True)
    tensors = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert adapter.tensors == len(tensors) == 2 * adapter.changed
    assert LINEARS[family] <= {name.split(".")[-3] for name in tensors}
    ids = torch.arange(9)[None] * 7
    with torch.no_grad():
        base = AutoModelForCausalLM.from_pretrained(package / "checkpoint", dtype=torch.float32)
        before = base(ids, use_cache=False).logits
        adapted = PeftModel.from_pretrained(base, tmp_path / "adapter")(ids, use_cache=False).logits
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / "last", dtype=torch.float32)(ids, use_cache=False)
    assert (adapted - merged.logits).norm() <= 1e-5 * merged.logits.norm()
    assert (adapted - before).norm() > 1e-3 * before.norm()


def test_indexers_learn_by_their_own_loss_and_are_frozen_without(made, tmp_path):
    package, data = made("deepseek_v32")
    frozen = train(package, data, tmp_path / "frozen", "train.mode=full")
    assert all(record["indexer_loss"] is None for record in read_metrics(frozen) if "loss" in record)
    trained = train(package, data, tmp_path / "trained", "train.mode=full", "train.indexer_loss=all", "train.steps=6")
    losses = [record["indexer_loss"] for record in read_metrics(trained) if "loss" in record]
    assert losses[-1] < losses[0]
    source = load_file(package / "checkpoint" / "model.safetensors")
    for run, moves in ((frozen, False), (trained, True)):
        export(run, tmp_path / f"{run.name}-out")
        after = load_file(tmp_path / f"{run.name}-out" / "model.safetensors")
        indexers = [name for name in source if ".indexer." in name]
        assert indexers
        assert all(torch.equal(after[name], source[name]) != moves for name in indexers if name.endswith("weight"))
    for settings, says in ((["train.mode=lora"], "train.mode=lora"), ([], "no layer with an indexer")):
        other = package if settings else made("recurrent_gemma")[0]
        with pytest.raises(InputError, match=says):
            train(other, data, tmp_path / "no", "train.mode=full", "train.indexer_loss=selected", *settings)


def test_a_run_says_at_its_start_that_peft_has_no_place_for_its_adapters(made, tmp_path):
    for family, expected in (("lfm2_moe", 1), ("recurrent_gemma", 0)):
        package, data = made(family)
        job = prepare(package, data=data, eval_data=None, run=tmp_path / family, world=1, overrides=SETTINGS)
        said = [note for note in job.notes if "PEFT has no module" in note]
        assert len(said) == expected
        assert not said or "layers.0.mixer" in said[0]
