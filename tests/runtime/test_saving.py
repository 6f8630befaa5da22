"""Saves that are killed, that run out of disk, that are written while training goes on; what is kept of them."""

import multiprocessing as mp
import os
import random
import shutil
import subprocess
import threading
import time

import harness
import pytest
import ranks_saving
import torch
import torch.distributed as dist
from torch.distributed import HashStore
from torch.distributed.checkpoint import FileSystemWriter

from dayzero.runtime import async_save, checkpointing, config, manifest
from dayzero.runtime.optimizer import make_optimizer


def stage(run):
    """How far the save that was killed had come."""
    left = list((run / "checkpoints").glob(".step_*")) if (run / "checkpoints").exists() else []
    if not left:
        return "between saves"
    if left[0].suffix == ".removed":
        return "removing an old one"
    names = {path.name for path in left[0].iterdir()}
    if manifest.FILE in names:
        return "manifest written"
    return "tensors complete" if ".metadata" in names else "tensors under way"


def check(run, at_least):
    """Every folder that has its name is whole and of one step. Returns the newest step."""
    found = checkpointing.checkpoints(run)
    for folder in found:
        assert checkpointing.problem(folder) == ""
        step = checkpointing.step_of(folder)
        tensors = dict(checkpointing.load_full(folder))
        assert all(torch.equal(tensors[name.removeprefix("model.")], value) for name, value in state(step).items())
    newest = checkpointing.step_of(found[0]) if found else 0
    assert newest >= at_least
    return newest


state = ranks_saving.state_at


@pytest.mark.slow
def test_fifty_kills_never_leave_a_torn_checkpoint(tmp_path):
    """25 before a given file operation of the first saves, and 25 at a random moment."""
    run, draw, stages, newest = tmp_path / "run", random.Random(0), set(), 0
    seconds = harness.run(ranks_saving.timed_saves, 1, tmp_path / "timed", 3)[0]
    context = mp.get_context("forkserver")
    for kill in range(50):
        ready = tmp_path / f"ready{kill}"
        operations = 2 * kill if kill < 25 else None
        process = context.Process(target=ranks_saving.save_until_killed, args=(run, operations, ready))
        process.start()
        if operations is None:
            while not ready.exists():
                time.sleep(0.002)
            time.sleep(draw.uniform(0, 2 * seconds))
            process.kill()
        process.join(30)
        assert process.exitcode == -9
        stages.add(stage(run))
        newest = check(run, newest)
    assert newest > 10
    assert {"tensors under way", "tensors complete", "manifest written"} <= stages


def test_a_manifest_vouches_for_its_step_and_itself(tmp_path):
    harness.run(ranks_saving.timed_saves, 1, tmp_path, 2)
    one, two = (tmp_path / "checkpoints" / f"step_0000000{n}" for n in (1, 2))
    assert [checkpointing.problem(folder) for folder in (one, two)] == ["", ""]
    mixed = shutil.copytree(two, tmp_path / "mixed" / "step_00000002")
    shutil.copy(one / "__0_0.distcp", mixed)  # as large as its own
    assert "changed since it was written" in checkpointing.problem(mixed)
    other = shutil.copytree(one, tmp_path / "other" / "step_00000009")
    assert "the checkpoint of step 1" in checkpointing.problem(other)
    file = two / manifest.FILE
    for before, after in (('"ranks": 1', '"ranks": 2'), ('"step": 2', '"step": 3')):
        text = file.read_text()
        assert before in text
        file.write_text(text.replace(before, after))
        assert "changed since it was written" in checkpointing.problem(two)
        file.write_text(text)


@pytest.fixture
def small_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=6m", "tmpfs", str(folder)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("a small disk takes the right to mount one")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_full_disk_is_a_clear_error_and_leaves_no_rubbish(small_disk):
    error, left = harness.run(ranks_saving.fill_the_disk, 1, small_disk)[0]
    assert "step_00000002 could not be written" in error
    assert "No space left on device" in error
    assert "\n" not in error
    assert left == ["step_00000001"]
    check(small_disk, 1)


@pytest.fixture
def group():
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def trained(group):
    model = torch.nn.Linear(4, 3)
    return model, make_optimizer(model, config.Optimizer(lr=0.1))


def move(model, optimizer):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def slow_disk(monkeypatch):
    """Writes wait for the event that is returned."""
    write, event = FileSystemWriter.write_data, threading.Event()

    def wait_and_write(self, *args):
        assert event.wait(20)
        return write(self, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", wait_and_write)
    return event


def test_training_goes_on_while_a_save_is_written(trained, tmp_path, monkeypatch):
    model, optimizer = trained
    disk, told = slow_disk(monkeypatch), []
    with async_save.Saver(tmp_path, config.Checkpoint(), told.append) as saver:
        move(*trained)
        want = [model.weight.detach().clone(), model.weight.detach().clone()]
        saver.save(1, model, optimizer)
        for _ in range(3):
            move(*trained)
        assert not torch.equal(model.weight, want[0])
        assert checkpointing.checkpoints(tmp_path) == []  # four steps are done, and the first is not yet written
        disk.set()
        want[1] = model.weight.detach().clone()
        saver.save(4, model, optimizer)  # waits for the first, and uses its memory again
        move(*trained)
    saved = [checkpointing.load_full(folder)["weight"] for folder in reversed(checkpointing.checkpoints(tmp_path))]
    assert [torch.equal(one, other) for one, other in zip(saved, want, strict=True)] == [True, True]
    assert told == []


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_failed_save_is_told_and_the_next_one_may_succeed(trained, tmp_path, monkeypatch, asynchronous):
    write, told = FileSystemWriter.write_data, []

    def fail_once(self, *args):
        if "00000002" in str(self.path):
            raise OSError(28, "No space left on device")
        return write(self, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", fail_once)
    settings = config.Checkpoint(asynchronous=asynchronous)
    with async_save.Saver(tmp_path, settings, told.append) as saver:
        for step in (1, 2, 3):
            saver.save(step, *trained)
    assert [checkpointing.step_of(folder) for folder in checkpointing.checkpoints(tmp_path)] == [3, 1]
    assert len(told) == 1
    assert "training goes on" in told[0]
    assert "No space left on device" in told[0]
    with (
        pytest.raises(OSError, match="step_00000002 could not be written"),
        async_save.Saver(tmp_path, settings, told.append) as saver,
    ):
        saver.save(2, *trained)  # the last one of the run
    assert checkpointing.step_of(checkpointing.latest(tmp_path)) == 3


def test_keeps_the_newest_and_the_best(trained, tmp_path):
    losses = {1: 3.0, 2: 1.0, 3: 2.0, 4: None, 5: float("nan"), 6: 4.0}
    for step, loss in losses.items():
        checkpointing.save(tmp_path, step, *trained, keep=2, keep_best=2, held_out_loss=loss)
    assert [checkpointing.step_of(folder) for folder in checkpointing.checkpoints(tmp_path)] == [6, 5, 3, 2]
    assert checkpointing.step_of(checkpointing.best(tmp_path)) == 2
    (tmp_path / "checkpoints" / "step_00000002" / "__0_0.distcp").write_bytes(b"torn")
    assert checkpointing.step_of(checkpointing.best(tmp_path)) == 3
    assert checkpointing.best(tmp_path / "nothing") is None


@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_every_kind_of_state_comes_back(group, tmp_path, name, states):
    model = torch.nn.Sequential(torch.nn.Linear(300, 4), torch.nn.Linear(4, 3))
    settings = config.Optimizer(name=name, states=states, lr=0.1)
    optimizer = make_optimizer(model, settings)
    for _ in range(2):
        move(model, optimizer)
    checkpointing.save(tmp_path, 2, model, optimizer, keep=1)
    want = {name: value.clone() for name, value in checkpointing.state_of(model, optimizer).items()}
    move(model, optimizer)
    again = torch.nn.Sequential(torch.nn.Linear(300, 4), torch.nn.Linear(4, 3))
    other = make_optimizer(again, settings)
    assert checkpointing.restore(tmp_path, again, other) == 2
    got = checkpointing.state_of(again, other)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], value) for name, value in want.items())
    move(again, other)
    after = checkpointing.state_of(model, optimizer)
    assert all(torch.equal(value, after[name]) for name, value in checkpointing.state_of(again, other).items())


def test_states_of_another_kind_are_refused(group, tmp_path):
    model = torch.nn.Linear(300, 4)
    optimizer = make_optimizer(model, config.Optimizer())
    move(model, optimizer)
    checkpointing.save(tmp_path, 1, model, optimizer, keep=1)
    for settings, says in (({"states": "bf16"}, "bfloat16"), ({"states": "8bit"}, "scale"), ({"name": "muon"}, "exp_")):
        with pytest.raises(checkpointing.InputError, match=rf"(?s){says}.*Resume with the settings"):
            checkpointing.restore(tmp_path, model, make_optimizer(model, config.Optimizer(**settings)))
    smaller = torch.nn.Linear(300, 4, bias=False)
    with pytest.raises(checkpointing.InputError, match="bias, which this run does not have"):
        checkpointing.restore(tmp_path, smaller, make_optimizer(smaller, config.Optimizer()))
