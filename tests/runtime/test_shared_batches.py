"""Training where ranks share a batch, over tp and cp: equal to plain training; steps, checkpoints, what is refused."""

import handmade
import harness
import pytest
import ranks_balance
import ranks_gradients
import ranks_train
import tiny
import torch

from dayzero.runtime.errors import InputError
from dayzero.runtime.job import prepare
from dayzero.runtime.metrics import read_metrics

FULL = ["train.mode=full", "optimizer.clip=0.5", "optimizer.weight_decay=0.1"]


@pytest.fixture(scope="module")
def run_training(tiny_run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")

    def run(name, *settings, world=1, resume=False):
        job = prepare(
            tiny_run.package,
            data=tiny_run.data,
            eval_data=tiny_run.eval_data,
            run=folder / name,
            world=world,
            overrides=settings if resume else [*tiny_run.settings, *settings],
            resume=resume,
        )
        harness.run(ranks_train.train, world, job)
        return folder / name

    return run


@pytest.fixture(scope="module")
def alone(run_training):
    """One rank, which test_train.py compares with a loop written down plainly."""
    return run_training("alone", *FULL, "train.steps=4", "checkpoint.every=2", "train.accumulation=4")


def slow(*case):
    return pytest.param(*case, marks=pytest.mark.slow)


def records(run, name):
    return [record[name] for record in read_metrics(run) if name in record]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "settings"),
    [
        (2, ["train.accumulation=4", "parallel.tp=2", "parallel.ep=2", "memory.loss_chunk=16"]),
        (2, ["train.accumulation=4", "parallel.cp=2", "parallel.ep=1"]),
        slow(4, ["train.accumulation=2", "parallel.tp=2", "parallel.ep=2", "memory.recompute=false"]),
        slow(4, ["train.accumulation=4", "parallel.tp=2", "parallel.cp=2", "parallel.ep=auto"]),
    ],
    ids=["tp2-ep2", "cp2", "tp2-shard2", "tp2-cp2"],
)
def test_training_equals_one_rank(world, settings, run_training, alone, request):
    run = run_training(request.node.callspec.id, *FULL, "train.steps=4", *settings, world=world)
    assert records(run, "loss") == pytest.approx(records(alone, "loss"), rel=2e-5)
    assert records(run, "grad_norm") == pytest.approx(records(alone, "grad_norm"), rel=2e-4)
    assert records(run, "eval_loss") == pytest.approx(records(alone, "eval_loss"), rel=2e-5)
    assert records(run, "tokens") == records(alone, "tokens")  # each counted once


@pytest.mark.slow
def test_resumes_on_another_mesh(run_training, alone):
    settings = [*FULL, "train.steps=4", "checkpoint.every=2", "train.accumulation=4"]
    run = run_training("moved", *settings, "parallel.tp=2", "parallel.ep=2", world=2)
    newest = sorted((run / "checkpoints").iterdir())[-1]
    (newest / "manifest.json").unlink()  # as if it had died before step 4 was saved
    run_training("moved", "parallel.tp=1", "parallel.cp=2", "parallel.ep=1", world=2, resume=True)
    assert records(run, "loss") == pytest.approx(records(alone, "loss"), rel=2e-5)
    assert records(run, "eval_loss")[-1] == pytest.approx(records(alone, "eval_loss")[-1], rel=2e-5)


@pytest.fixture(scope="module")
def package(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shared")
    config = {"num_hidden_layers": 2, "num_experts": 8, "vocab_size": 308, "tokenizer": False}
    return handmade.write(tiny.make("mixtral", folder / "checkpoint", **config), folder / "package")


@pytest.mark.slow
def test_a_checkpoint_has_the_same_state_on_every_mesh(package, tmp_path):
    saved = harness.run(ranks_train.save, 4, package, (1, 2, 2, 2), tmp_path / "run", 1, [3], 5)[0]
    for world, layout in ((2, (1, 1, 2, 1, 2)), (1, (1, 1, 1)), (2, (1, 1, 1, 2))):
        step, state, _ = harness.run(ranks_train.restore, world, package, layout, tmp_path / "run")[0]
        assert step == 3
        assert state.keys() == saved.keys()
        assert all(torch.equal(value, saved[name]) for name, value in state.items()), layout


@pytest.mark.slow
def test_a_step_equals_that_of_one_process(package):
    # layout, optimizer, LoRA, recompute, accumulation
    cases = [
        ((1, 2, 2, 2), "adamw", False, True, 3),
        ((1, 2, 4, 2), "muon", False, False, 1),
        ((2, 1, 2, 1, 2), "muon", False, True, 1),
        ((1, 1, 4, 2, 2), "adamw", True, True, 3),
    ]
    for of_rank in harness.run(ranks_gradients.worst_errors, 4, package, cases, timeout=100):
        for errors in of_rank:
            assert all(error <= 1e-9 for error in errors.values()), errors


LOSSES = {"auxiliary_loss": 0.5, "sequence_loss": 0.25, "z_loss": 0.125}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "cases"),
    [
        (2, [((1, 1, 2, 2), False), ((1, 1, 1, 1, 2), True)]),  # layout, recompute
        slow(4, [((1, 1, 2, 2, 2), False), ((1, 1, 4, 4), True), ((1, 1, 2, 1, 4), False)]),
    ],
    ids=["two-ranks", "four-ranks"],
)
def test_losses_of_routers_equal_those_of_one_process(world, cases, package):
    """In float64: of documents that lie on several ranks, too, and each term by itself matters."""
    for of_rank in harness.run(ranks_balance.of_shared_batches, world, package, LOSSES, cases, timeout=100):
        for found in of_rank:
            assert found["gradients"] <= 1e-9, found["where"]
            assert found["losses"].keys() == {"auxiliary", "sequence", "z"}
            assert all(error <= 1e-9 for error in found["losses"].values())
            assert found["counts"]
            assert found["share"] > 1e-3  # of a router's gradient that is the losses'


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        (["parallel.tp=3"], r"parallel.tp\n.*3, with cp 1\n.*divides the 4 ranks"),
        (["parallel.tp=4", "parallel.cp=2"], "4, with cp 2"),
        (["parallel.tp=2", "parallel.dp_replicate=4"], r"dp_replicate\n.*4\n.*divisor of the 2 batches at a time"),
    ],
)
def test_what_does_not_fit_is_refused(settings, says, tiny_run, tmp_path):
    with pytest.raises(InputError, match=says):
        prepare(
            tiny_run.package,
            data=tiny_run.data,
            eval_data=None,
            run=tmp_path / "run",
            world=4,
            overrides=[*tiny_run.settings, "parallel.ep=1", *settings],
        )


def test_ranks_share_a_batch_by_themselves_only_where_it_does_not_fit(tmp_path, tiny_run, monkeypatch):
    def shared(*settings):
        job = prepare(
            tiny_run.package,
            data=tiny_run.data,
            eval_data=None,
            run=tmp_path / "run",
            world=4,
            overrides=[*tiny_run.settings, "data.tokens_per_rank=4000000", *settings],
            write=False,
        )
        assert (job.config.parallel.tp, job.config.parallel.cp) == (job.layout.tp, job.layout.cp)
        assert job.layout.world == 4
        noted = [note for note in job.notes if "does not fit into a device" in note]
        return job.layout.tp, job.layout.cp, len(noted)

    assert shared() == (1, 1, 0)  # a CPU, whose memory nobody asks for
    monkeypatch.setattr("dayzero.runtime.job.device_gib", lambda: 80.0)
    assert shared() == (1, 1, 0)
    monkeypatch.setattr("dayzero.runtime.job.device_gib", lambda: 10.0)
    assert shared() == (2, 2, 1)
    assert shared("parallel.tp=1", "parallel.cp=1") == (1, 1, 0)
