"""A decoder with an encoder beside it through onboarding, training, and back to the source's own names."""

import harness
import pytest
import ranks
import torch
from examples import write_examples
from safetensors.torch import load_file
from transformers import AutoModelForSeq2SeqLM
from zoo import trainable

from dayzero.runtime import launch
from dayzero.runtime.errors import InputError
from dayzero.runtime.export import export
from dayzero.runtime.job import prepare
from dayzero.runtime.metrics import read_metrics
from dayzero.runtime.package import load_package
from dayzero.runtime.safetensors_reader import TensorsReader
from dayzero.runtime.weights import bind

pytestmark = pytest.mark.slow

SETTINGS = ["data.max_length=64", "data.tokens_per_rank=64", "log.tensorboard=false", "train.precision=fp32"]
SETTINGS += ["optimizer.lr=1e-2", "optimizer.warmup=1", "optimizer.clip=1e6", "train.mode=full"]


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("encoder")
    write_examples(folder / "data.jsonl", 30, seed=0)
    return trainable.package("switch_transformers", folder)


def train(package, run, world, *settings):
    data = package.parent / "data.jsonl"
    overrides = [*SETTINGS, *settings]
    job = prepare(package, data=data, eval_data=data, run=run, world=world, overrides=overrides)
    launch.run(job, world)
    return [record["loss"] for record in read_metrics(run) if "loss" in record]


def test_it_trains_and_goes_back_under_its_own_names(package, tmp_path):
    losses = train(package, tmp_path / "run", 1, "train.steps=4")
    assert losses[-1] < losses[0]
    export(tmp_path / "run", tmp_path / "out")
    before, after = (load_file(folder / "model.safetensors") for folder in (package / "checkpoint", tmp_path / "out"))
    assert after.keys() == before.keys()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    for part in ("encoder.block.0.layer.0.SelfAttention.relative_attention_bias", "encoder.block.1.layer.1.mlp.router"):
        assert any(name.startswith(part) for name in moved)
    assert "decoder.block.1.layer.1.EncDecAttention.k.weight" in moved
    ids = torch.arange(3, 20)
    with torch.no_grad():
        reference = AutoModelForSeq2SeqLM.from_pretrained(tmp_path / "out", dtype=torch.float32)
        theirs = reference(input_ids=ids[None, :9], decoder_input_ids=ids[None], use_cache=False).logits[0]
        ours = load_package(package).build()
        shapes = {name: tuple(tensor.shape) for name, tensor in after.items()}
        held = {n: rule.read(TensorsReader(after), shapes) for n, rule in bind(load_package(package).rules).items()}
        ours.load_state_dict(held)
        got = ours(ids, torch.tensor([0, 17]), source=(ids[:9], torch.tensor([0, 9])))
    assert (got - theirs).norm() <= 1e-5 * theirs.norm()


def test_ranks_that_share_experts_get_the_gradients_of_one(package):
    case = {"layout": (1, 3, 3), "recomputed": True}
    for result in harness.run(ranks.expert_parallel, 3, {"encoder": (package, case)}, timeout=120):
        errors = result["encoder"]
        assert all(errors[of] <= 1e-9 for of in ("loss", "gradients", "norm")), errors["where"]


def test_ranks_cannot_share_its_batch(package, tmp_path):
    with pytest.raises(InputError, match="1 for a model with an encoder"):
        train(package, tmp_path / "run", 2, "parallel.tp=2")
