"""The training loop against a plain PyTorch one, on several ranks, over a restart, and when it goes wrong."""

import json
import math

import harness
import pytest
import ranks_train
import torch
from torch.distributed.checkpoint import FileSystemWriter

from dayzero.runtime import checkpointing, launch
from dayzero.runtime.errors import InputError, RunFailed
from dayzero.runtime.headers import read_headers
from dayzero.runtime.job import prepare, stored_examples
from dayzero.runtime.load import load_checkpoint
from dayzero.runtime.metrics import read_metrics, summarise
from dayzero.runtime.package import load_package
from dayzero.runtime.packing import Packer
from dayzero.runtime.schedule import learning_rate
from dayzero.runtime.train import train_step

FULL = ["train.mode=full", "optimizer.clip=0.5", "optimizer.weight_decay=0.1"]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def run_training(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def run(name, *settings, world=1, resume=False, eval_data=None, data=None):
        job = prepare(
            tiny_run.package,
            data=data or tiny_run.data,
            eval_data=eval_data,
            run=tmp_path / name,
            world=world,
            overrides=settings if resume else [*tiny_run.settings, *settings],
            resume=resume,
        )
        if world == 1:
            launch.run(job, 1)
        else:
            harness.run(ranks_train.train, world, job)
        return tmp_path / name

    return run


def losses(run):
    return [(record["loss"], record["grad_norm"]) for record in read_metrics(run) if "loss" in record]


def plain_losses(tiny_run, run, steps, batches_per_step):
    """The same training, written down plainly: one process, one model, torch's own clipping and AdamW."""
    package = load_package(tiny_run.package)
    model = package.build()
    load_checkpoint(model, package.rules, package.checkpoint, read_headers(package.checkpoint))
    decay, rest = ([p for p in model.parameters() if (p.ndim > 1) == matrix] for matrix in (True, False))
    groups = [{"params": decay, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95))
    packer = Packer(stored_examples(run / "data" / "train.pt"), 128, batches_per_step, seed=0)
    records = []
    for step in range(steps):
        batches = [packer.batch(step, rank) for rank in range(batches_per_step)]
        valid = sum(int((batch.labels != -100).sum()) for batch in batches)
        loss = sum(model(batch.ids, batch.cu_seqlens, batch.labels) for batch in batches) / valid
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps=steps, peak=3e-3, warmup=2, floor=0.1)
        optimizer.step()
        records.append((float(loss.detach()), float(norm)))
    return records


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (1, ["train.accumulation=4", "memory.recompute=false"]),
        (2, ["train.accumulation=2", "parallel.ep=2", "memory.loss_chunk=16"]),
        pytest.param(4, ["train.accumulation=1", "parallel.ep=2"], marks=pytest.mark.slow),
    ],
    ids=["one-rank", "two-ranks", "four-ranks"],
)
def test_equals_plain_training(world, settings, run_training, tiny_run):
    run = run_training("run", *FULL, "train.steps=6", *settings, world=world)
    want = plain_losses(tiny_run, run, 6, batches_per_step=4)
    got = losses(run)
    assert len(got) == 6
    for (loss, norm), (want_loss, want_norm) in zip(got, want, strict=True):
        assert loss == pytest.approx(want_loss, rel=2e-5)
        assert norm == pytest.approx(want_norm, rel=2e-4)
    assert want[-1][0] < want[0][0] - 0.3  # it learns


@pytest.mark.parametrize("world", [1, pytest.param(4, marks=pytest.mark.slow)])
def test_resumes_bit_for_bit(world, run_training):
    settings = ["lora.dropout=0.2", "checkpoint.every=2", "train.precision=bf16"]
    if world > 1:
        settings += ["parallel.ep=2"]
    whole = run_training("whole", "train.steps=6", *settings, world=world)
    run_training("parts", "train.steps=6", *settings, world=world)
    # Step 6 is lost, as if the run had died before it was written, and so is what was logged after step 4.
    newest = checkpointing.latest(whole.parent / "parts")
    (newest / "manifest.json").unlink()
    parts = run_training("parts", world=world, resume=True)
    assert losses(parts) == losses(whole)
    mine, other = (checkpointing.load_full(checkpointing.latest(run)) for run in (parts, whole))
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_lora_trains_adapters_alone_and_evaluates(run_training, tiny_run):
    settings = ["train.steps=5", "eval.every=2", "lora.rank=4", "optimizer.lr=3e-2"]
    run = run_training("run", *settings, eval_data=tiny_run.eval_data)
    names = set(checkpointing.load_full(checkpointing.latest(run)))
    parts = [
        f"layers.{n}.mixer.{m}.lora_{x}" for n in (0, 1) for m in ("query", "key", "value", "output") for x in "ab"
    ]
    assert names == set(parts)
    evaluations = [(record["step"], record["eval_loss"]) for record in read_metrics(run) if "eval_loss" in record]
    assert [step for step, _ in evaluations] == [0, 2, 4, 5]
    package = load_package(tiny_run.package)
    model = package.build()
    load_checkpoint(model, package.rules, package.checkpoint, read_headers(package.checkpoint))
    total, valid = 0.0, 0
    for example in stored_examples(run / "data" / "eval.pt"):
        ids, labels = torch.tensor(example.ids), torch.tensor(example.labels)
        total += float(model(ids, torch.tensor([0, len(ids)]), labels).detach())
        valid += int((labels != -100).sum())
    assert evaluations[0][1] == pytest.approx(total / valid, rel=1e-5)
    assert evaluations[-1][1] < evaluations[0][1]

    summary = summarise(run)
    assert (summary["steps"], summary["eval_first"], summary["eval_last"]) == (5, evaluations[0][1], evaluations[-1][1])
    records = [record for record in read_metrics(run) if "loss" in record]
    assert (summary["loss_first"], summary["loss_last"]) == (records[0]["loss"], records[-1]["loss"])
    assert all(1.0 <= record["expert_load"] <= 3.0 for record in records)  # 6 experts, 2 a token
    assert all(record["peak_bytes"] > 1e7 and 0 < record["tokens"] <= 128 for record in records)


@pytest.mark.slow
def test_ranks_without_examples_take_part(run_training, tiny_run, tmp_path):
    few = tmp_path / "few.jsonl"
    few.write_text("".join(tiny_run.data.read_text().splitlines(keepends=True)[:2]))
    settings = [*FULL, "train.steps=2", "parallel.ep=2"]
    spread = run_training("spread", *settings, world=4, data=few)
    assert losses(spread)[1][0] < losses(spread)[0][0]
    alone = run_training("alone", *settings[:-1], "train.accumulation=4", data=few)
    for (loss, norm), (want_loss, want_norm) in zip(losses(spread), losses(alone), strict=True):
        assert loss == pytest.approx(want_loss, rel=2e-5)
        assert norm == pytest.approx(want_norm, rel=2e-4)


def test_random_weights_start_near_the_uniform_loss(run_training):
    run = run_training("run", "train.init=random", "train.mode=full", "train.steps=1")
    assert losses(run)[0][0] == pytest.approx(math.log(307), rel=0.02)


@pytest.mark.parametrize(("allowed", "says"), [(0, "step 2: "), (2, "steps 2 to 4: ")])
def test_a_loss_that_stays_no_number_ends_the_run(allowed, says, run_training, tmp_path):
    settings = ["train.mode=full", "train.steps=9", "optimizer.lr=1e30", "optimizer.warmup=0"]
    with pytest.raises(
        RunFailed, match=rf"(?s){says}.*nan.*weights of step 1 are unchanged.*no checkpoint yet"
    ) as error:
        run_training("run", *settings, f"train.max_skipped={allowed}")
    assert error.value.code == 1
    assert summarise(tmp_path / "run")["skipped"] == allowed + 1
    assert summarise(tmp_path / "run")["loss_last"] == losses(tmp_path / "run")[0][0]


class OneBadStep:
    """train_step with a loss of one rank that is no number in the given step."""

    def __init__(self, step):
        self.step = step

    def __call__(self, model, optimizer, batches, job, step, device, balance):
        if step + 1 == self.step:
            hook = model.norm.register_forward_hook(lambda *args: args[2] * float("nan"))
            metrics = train_step(model, optimizer, batches, job, step, device, balance)
            hook.remove()
            return metrics
        return train_step(model, optimizer, batches, job, step, device, balance)


def test_a_single_bad_step_is_skipped_counted_and_kept(run_training, tmp_path, monkeypatch):
    settings = [*FULL, "train.steps=5", "checkpoint.every=1", "checkpoint.keep=5", "train.max_skipped=1"]
    monkeypatch.setattr("dayzero.runtime.train.train_step", OneBadStep(3))
    run = run_training("run", *settings)
    found = losses(run)
    assert [loss is None for loss, _ in found] == [False, False, True, False, False]
    assert "NaN" not in (run / "metrics.jsonl").read_text()
    assert (summarise(run)["skipped"], summarise(run)["steps"]) == (1, 5)
    before, after, later = (checkpointing.load_full(run / "checkpoints" / f"step_0000000{n}") for n in (2, 3, 4))
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert not torch.equal(later["embed.weight"], after["embed.weight"])
    kept = json.loads((run / "skipped" / "step_00000003_rank_0.json").read_text())
    batch = Packer(stored_examples(run / "data" / "train.pt"), 128, 1, seed=0).batch(2, 0)
    assert kept["batches"] == [
        {"ids": batch.ids.tolist(), "labels": batch.labels.tolist(), "cu_seqlens": batch.cu_seqlens.tolist()}
    ]
    assert (kept["step"], kept["loss"]) == (3, "nan")
    assert "embed.weight" in kept["parameters"]


@pytest.mark.slow
def test_a_resumed_run_on_other_ranks_keeps_the_batches_of_a_step(run_training):
    settings = [*FULL, "train.steps=6", "checkpoint.every=3"]
    whole = run_training("whole", *settings, "parallel.ep=2", world=2)
    run_training("parts", *settings, "parallel.ep=2", world=2)
    (checkpointing.latest(whole.parent / "parts") / "manifest.json").unlink()
    parts = run_training("parts", "parallel.ep=1", resume=True)
    assert json.loads((parts / "run.json").read_text())["config"]["train"]["accumulation"] == 2
    for (loss, norm), (want_loss, want_norm) in zip(losses(parts), losses(whole), strict=True):
        assert loss == pytest.approx(want_loss, rel=2e-5)
        assert norm == pytest.approx(want_norm, rel=2e-4)


@pytest.mark.slow
def test_the_best_checkpoint_is_kept(run_training, tiny_run):
    settings = [*FULL, "train.steps=6", "checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_best=1"]
    run = run_training("run", *settings, "eval.every=100", "optimizer.lr=0.3", eval_data=tiny_run.eval_data)
    judged = {r["step"]: r["eval_loss"] for r in read_metrics(run) if "eval_loss" in r and r["step"]}
    assert judged.keys() == {2, 4, 6}
    lowest = min(judged, key=judged.__getitem__)
    assert checkpointing.step_of(checkpointing.best(run)) == lowest
    assert {checkpointing.step_of(folder) for folder in checkpointing.checkpoints(run)} == {lowest, 6}


def test_keeping_the_best_takes_held_out_data(run_training):
    with pytest.raises(InputError, match="keep_best"):
        run_training("run", "checkpoint.keep_best=1")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["muon", "adamw"])
def test_small_states_and_muon_train(name, run_training, tiny_run):
    settings = [*FULL, "train.steps=6", f"optimizer.name={name}"]
    plain = run_training("plain", *settings)
    small = run_training("small", *settings, "optimizer.states=8bit", "optimizer.offload=true")
    first, last = losses(plain)[0][0], losses(plain)[-1][0]
    assert last < first - 0.3
    assert losses(small)[-1][0] == pytest.approx(last, rel=0.02)


def test_an_unexpected_error_is_one_line_and_a_log(run_training, monkeypatch, tmp_path):
    monkeypatch.setattr("dayzero.runtime.train.train_step", lambda *args: 1 / 0)
    with pytest.raises(RunFailed, match=r"^rank 0: ZeroDivisionError: division by zero\n  log  .*rank_0\.log"):
        run_training("run")
    assert "Traceback" in (tmp_path / "run" / "logs" / "rank_0.log").read_text()


def test_a_full_disk_leaves_the_last_checkpoint(run_training, monkeypatch, tmp_path):
    write = FileSystemWriter.write_data

    def write_twice(self, *args):
        if "00000003" in str(self.path):
            raise OSError("No space left on device")
        return write(self, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", write_twice)
    with pytest.raises(RunFailed, match=r"(?s)step_00000003 could not be written: No space left.*step_00000002"):
        run_training("run", "train.steps=3", "checkpoint.every=1")
    assert checkpointing.step_of(checkpointing.latest(tmp_path / "run")) == 2


def test_a_finished_run_is_not_overwritten(run_training):
    run_training("run", "train.steps=1")
    with pytest.raises(InputError, match="--resume"):
        run_training("run", "train.steps=1")
    run_training("run", resume=True)


@pytest.mark.parametrize(
    ("settings", "world", "says"),
    [
        (["parallel.ep=3"], 2, "divisor of the 2 ranks"),
        (["parallel.ep=4"], 4, "6 experts"),
        (["parallel.ep=1", "parallel.dp_replicate=3"], 4, "dp_replicate"),
        (["lora.targets=[nothing]"], 1, "lora.targets: nothing"),
        (["data.tokens_per_rank=999", "data.max_length=999"], 1, "256 positions"),
    ],
)
def test_settings_that_do_not_fit_are_refused_before_any_process(settings, world, says, run_training):
    with pytest.raises(InputError, match=says):
        run_training("run", *settings, world=world)


@pytest.mark.slow
def test_parts_losses_and_loads_in_a_run(run_training):
    """Two ranks that share the experts, tokens in parts: the losses of one process, and what the metrics add."""
    settings = ("train.steps=3", "train.mode=full", "balance.sequence_loss=0.1", "balance.z_loss=0.01")
    shared = run_training("shared", *settings, "experts.parts=2", "balance.duplicates=1", "parallel.ep=2", world=2)
    alone = run_training("alone", *settings, "train.accumulation=2", "experts.merge_below=4")
    for one, other in zip(read_metrics(shared), read_metrics(alone), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=2e-4)
        assert 0 < one["communication_share"] < 1
        assert other["communication_share"] is None
        assert one["expert_loads"].keys() == {"layers.0.ffn", "layers.1.ffn"}
        assert one["expert_load"] == max(one["expert_loads"].values()) >= 1
        assert one["router_losses"].keys() == {"sequence", "z"}
    first, other = read_metrics(shared)[0], read_metrics(alone)[0]
    assert first["loss"] == pytest.approx(other["loss"], rel=1e-5)
    assert first["expert_loads"] == other["expert_loads"]
    assert first["router_losses"]["z"] == pytest.approx(other["router_losses"]["z"], rel=1e-5)
