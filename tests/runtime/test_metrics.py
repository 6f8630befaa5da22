import dataclasses
import io
import json

import pytest
from rich.console import Console

from dayzero.runtime.metrics import MetricsLog, StepMetrics, read_metrics, summarise

FIRST = StepMetrics(1, 3.5, 1.25, 1e-4, 100, 50.0, 1000, 1.5)


def write(run, steps, done=0, console=None, tensorboard=False):
    with MetricsLog(run, 10, done, tensorboard, console or Console(file=io.StringIO())) as log:
        if not done:
            log.evaluation(0, 4.0)
        for step in steps:
            log.step(dataclasses.replace(FIRST, step=step, loss=3.5 - step / 10, tokens_per_s=50.0 * step))
        log.evaluation(steps[-1], 2.0)


def test_a_line_a_step(tmp_path):
    out = io.StringIO()
    write(tmp_path, [1, 2], console=Console(file=out))
    first, second, third, last = read_metrics(tmp_path)
    assert first == {"step": 0, "eval_loss": 4.0}
    assert second == {**dataclasses.asdict(FIRST), "loss": 3.4}
    assert (third["step"], last) == (2, {"step": 2, "eval_loss": 2.0})
    assert out.getvalue().splitlines() == [
        "step 0/10  held-out loss 4.0000",
        "step 1/10  loss 3.4000  norm 1.250  50 tokens/s  expert load 1.50  lr 1.00e-04",
        "step 2/10  loss 3.3000  norm 1.250  100 tokens/s  expert load 1.50  lr 1.00e-04",
        "step 2/10  held-out loss 2.0000",
    ]


def test_a_resumed_run_has_every_step_once(tmp_path):
    write(tmp_path, [1, 2, 3, 4])
    with (tmp_path / "metrics.jsonl").open("a") as stream:
        stream.write('{"step": 5, "lo')  # a crash in the middle of a line
    write(tmp_path, [3, 4, 5], done=2)
    records = read_metrics(tmp_path)
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4, 5]
    assert [record["step"] for record in records if "eval_loss" in record] == [0, 5]


def test_summary(tmp_path):
    assert summarise(tmp_path)["loss_first"] is None
    write(tmp_path, [1, 2, 4])
    summary = summarise(tmp_path)
    assert (summary["steps"], summary["loss_first"], summary["loss_last"]) == (4, 3.4, 3.1)
    assert (summary["eval_first"], summary["eval_last"], summary["peak_bytes"]) == (4.0, 2.0, 1000)
    assert summary["tokens_per_s"] == pytest.approx(200 / (100 / 100 + 100 / 200))  # without the first step


def test_a_terminal_gets_a_progress_bar(tmp_path):
    out = io.StringIO()
    write(tmp_path, [1, 2], console=Console(file=out, force_terminal=True, width=120))
    assert "2/10" in out.getvalue()
    assert "step 1/10  loss" not in out.getvalue()
    assert "held-out loss 2.0000" in out.getvalue()


def test_tensorboard_files(tmp_path):
    write(tmp_path, [1, 2, 3], tensorboard=True)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    losses = [(event.step, event.value) for event in events.Scalars("loss")]
    assert losses == [(1, pytest.approx(3.4)), (2, pytest.approx(3.3)), (3, pytest.approx(3.2))]
    assert json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])["loss"] == 3.4
