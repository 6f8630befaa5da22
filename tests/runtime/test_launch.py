"""The installed command on several processes, and what it survives."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from dayzero.runtime import checkpointing
from dayzero.runtime.metrics import read_metrics

pytestmark = pytest.mark.slow
RUNTIME = [sys.executable, "-m", "dayzero.runtime.cli"]


class Command:
    """`runtime train` of the tiny package into `run`, in the background."""

    def __init__(self, tiny_run, run: Path, *more: str, launcher=RUNTIME, output: Path | None = None):
        settings = [*tiny_run.settings, "parallel.ep=2", "train.steps=10", "checkpoint.every=3", "lora.dropout=0.1"]
        words = [word for setting in settings for word in ("--set", setting)]
        # Not --run: torchrun takes that for an abbreviation of its own --run-path.
        data = ["--data", tiny_run.data, "--eval-data", tiny_run.eval_data, "--run-dir", run]
        command = [*launcher, "train", tiny_run.package, *data, *words, *more]
        self.run, self.output = run, output or run.with_suffix(".out")
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        with self.output.open("w") as out:
            self.process = subprocess.Popen(list(map(str, command)), stdout=out, stderr=out, env=environment)

    def wait_for(self, text: str) -> None:
        end = time.monotonic() + 90
        while text not in self.text:
            assert self.process.poll() is None, self.text
            assert time.monotonic() < end, self.text
            time.sleep(0.02)

    def finish(self) -> int:
        return self.process.wait(90)

    def pid(self, rank: int) -> int:
        log = (self.run / "logs" / f"rank_{rank}.log").read_text()
        return int(re.findall(r"process (\d+)", log)[-1])

    def kill_rank(self, rank: int) -> None:
        os.kill(self.pid(rank), signal.SIGKILL)

    @property
    def text(self) -> str:
        return self.output.read_text()


def comparable(run: Path) -> list[tuple]:
    keys = ("step", "loss", "grad_norm", "lr", "expert_load", "eval_loss")
    return [tuple(record.get(key) for key in keys) for record in read_metrics(run)]


@pytest.fixture(scope="module")
def whole(tiny_run, tmp_path_factory):
    """A run that nothing disturbed."""
    command = Command(tiny_run, tmp_path_factory.mktemp("whole") / "run", "--nproc", "2", "--json")
    assert command.finish() == 0, command.text
    return command


def test_several_processes(whole):
    summary = json.loads(whole.text.splitlines()[-1])
    assert (summary["ok"], summary["steps"]) == (True, 10)
    assert [path.name for path in checkpointing.checkpoints(whole.run)] == ["step_00000010", "step_00000009"]
    assert sorted(path.name for path in (whole.run / "logs").iterdir()) == ["rank_0.log", "rank_1.log"]
    assert [(step, evaluation is None) for step, *_, evaluation in comparable(whole.run)] == [
        (0, False), *((step, True) for step in range(1, 11)), (10, False),
    ]  # fmt: skip


def test_killed_and_resumed_is_bit_for_bit_the_same(whole, tiny_run, tmp_path):
    first = Command(tiny_run, tmp_path / "run", "--nproc", "2")
    first.wait_for("step 5/10")
    first.kill_rank(1)
    assert first.finish() == 1
    assert "rank 1: ended by SIGKILL" in first.text
    assert "step_00000003" in first.text
    assert "Traceback" not in first.text
    second = Command(tiny_run, tmp_path / "run", "--nproc", "2", "--resume")
    assert second.finish() == 0, second.text
    assert "resuming after step 3" in second.text or "resuming after step 6" in second.text
    assert comparable(first.run) == comparable(whole.run)
    mine, other = (checkpointing.load_full(checkpointing.latest(run)) for run in (first.run, whole.run))
    assert mine.keys() == other.keys()
    assert all(torch.equal(mine[name], other[name]) for name in mine)


def test_restarts_by_itself(whole, tiny_run, tmp_path):
    command = Command(tiny_run, tmp_path / "run", "--nproc", "2", "--restarts", "1")
    command.wait_for("step 5/10")
    command.kill_rank(1)
    assert command.finish() == 0, command.text
    assert "resuming after step" in command.text
    assert comparable(command.run) == comparable(whole.run)


def test_interrupted(tiny_run, tmp_path):
    command = Command(tiny_run, tmp_path / "run", "--nproc", "2", "--json", "--set", "train.steps=500")
    command.wait_for("step 4/500")
    command.process.send_signal(signal.SIGINT)
    assert command.finish() == 130
    *_, text, line = command.text.splitlines()
    assert text.startswith("interrupted; last checkpoint ")
    assert f"--resume --run {tmp_path}/run" in text
    assert json.loads(line)["ok"] is False
    assert "Traceback" not in command.text


@pytest.mark.parametrize("ranks", [1, 2])
def test_sigterm_saves_and_ends_well(ranks, whole, tiny_run, tmp_path):
    settings = ["--set", "checkpoint.every=100", "--set", f"parallel.ep={ranks}"]
    command = Command(tiny_run, tmp_path / "run", "--nproc", str(ranks), "--json", *settings)
    command.wait_for("step 4/10")
    command.process.send_signal(signal.SIGTERM)
    assert command.finish() == 0, command.text
    summary = json.loads(command.text.splitlines()[-1])
    assert (summary["ok"], summary["steps"] in range(4, 10)) == (True, True)
    assert "asked to stop" in command.text
    assert checkpointing.step_of(checkpointing.latest(command.run)) == summary["steps"]
    if ranks == 2:
        assert Command(tiny_run, tmp_path / "run", "--nproc", "2", "--resume").finish() == 0
        assert comparable(command.run) == comparable(whole.run)


def test_a_hung_rank_ends_the_run_and_is_named(tiny_run, tmp_path):
    command = Command(tiny_run, tmp_path / "run", "--nproc", "2", "--set", "train.timeout=0.05")
    command.wait_for("step 2/10")
    os.kill(command.pid(1), signal.SIGSTOP)
    assert command.finish() == 1
    assert re.search(r"rank 0: Hung: \w+ of \[.*timed out; ranks that did not come: 1", command.text), command.text
    assert "Traceback" not in command.text


def test_a_killed_launcher_leaves_no_rank_behind(tiny_run, tmp_path):
    command = Command(tiny_run, tmp_path / "run", "--nproc", "2", "--set", "train.steps=500")
    command.wait_for("step 2/500")
    ranks = [command.pid(rank) for rank in range(2)]
    command.process.kill()
    command.finish()
    end = time.monotonic() + 10
    while any(Path(f"/proc/{rank}").exists() for rank in ranks):
        assert time.monotonic() < end, f"of {ranks} some still run"
        time.sleep(0.05)


def test_joins_the_processes_of_torchrun(whole, tiny_run, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = Command(tiny_run, tmp_path / "run", launcher=[*torchrun, "-m", "dayzero.runtime.cli"])
    assert command.finish() == 0, command.text
    assert comparable(command.run) == comparable(whole.run)


def test_two_nodes_restart_together(whole, tiny_run, tmp_path):
    """Each node has an agent of its own, which counts only the failures of its own ranks."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    nodes = []
    for node in range(2):
        torchrun = [
            *(sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"),
            *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "job17"),
            *("--rdzv-conf", f"is_host={int(node == 0)}", "--max-restarts", "2", "--monitor-interval", "0.2"),
        ]
        launcher = [*torchrun, "-m", "dayzero.runtime.cli"]
        nodes.append(Command(tiny_run, tmp_path / "run", launcher=launcher, output=tmp_path / f"node{node}.out"))
    end = time.monotonic() + 90
    while "step 5/10" not in nodes[0].text + nodes[1].text:
        assert time.monotonic() < end, nodes[0].text + nodes[1].text
        time.sleep(0.02)
    os.kill(worker_of(nodes[1].process.pid), signal.SIGKILL)
    codes = [node.finish() for node in nodes]
    text = nodes[0].text + nodes[1].text
    assert codes == [0, 0], text
    assert re.search("resuming after step [36]", text)
    assert comparable(nodes[0].run) == comparable(whole.run)


def worker_of(agent: int) -> int:
    """The rank that a torchrun of one rank started."""
    children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
    return next(int(pid) for pid in children if b"dayzero.runtime.cli" in Path(f"/proc/{pid}/cmdline").read_bytes())


def test_what_only_a_rank_can_see_is_bad_input_too(tiny_run, tmp_path):
    broken = tmp_path / "checkpoint"
    broken.mkdir()
    for file in tiny_run.checkpoint.iterdir():
        (broken / file.name).write_bytes(file.read_bytes())
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.1.block_sparse_moe.experts.4.w2.weight"][3, 3] = torch.nan
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    command = Command(tiny_run, tmp_path / "run", "--nproc", "2", "--checkpoint", str(broken))
    assert command.finish() == 2
    assert "layers.1.ffn.experts.down" in command.text
    assert "1 NaN values" in command.text
    assert "Traceback" not in command.text
