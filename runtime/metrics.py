"""What a run reports: metrics.jsonl, TensorBoard files, and lines or a progress bar on the terminal."""

import json
import math
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Column

FILE = "metrics.jsonl"


@dataclass(frozen=True)
class StepMetrics:
    """One optimizer step over all ranks.

    step: steps done, counted from 1. loss: mean over the trained tokens. tokens: read in this step. expert_load: token
    copies of the busiest expert over the mean, of the least even layer; None without routed experts. peak_bytes: the
    most of any rank. skipped: loss or norm is not finite, and the weights have not changed. indexer_loss: mean over
    tokens, summed over layers; None where indexers are not trained. communication_share: part of the step for which
    computation waited for tokens on their way to experts and back, mean over the ranks; None where none travel.
    expert_loads: expert_load of every layer. router_losses: by name, summed over layers, as they were trained.
    """

    step: int
    loss: float
    grad_norm: float
    lr: float
    tokens: int
    tokens_per_s: float
    peak_bytes: int
    expert_load: float | None
    skipped: bool = False
    indexer_loss: float | None = None
    communication_share: float | None = None
    expert_loads: dict[str, float] | None = None
    router_losses: dict[str, float] | None = None


class MetricsLog:
    """Writes the metrics of one process, which is rank 0. Use it in a `with` block."""

    def __init__(self, run: Path, steps: int, done: int, tensorboard: bool, console: Console):
        """steps: of the whole run. done: steps that a checkpoint restored; later records are dropped."""
        self.console, self.steps = console, steps
        _drop_after(run / FILE, done)
        self.file = (run / FILE).open("a")
        self.board = _tensorboard(run / "tensorboard", done) if tensorboard else None
        self.progress = None
        if console.is_terminal:
            columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}"))
            left = TimeRemainingColumn(table_column=Column(no_wrap=True, min_width=len("0:00:00")))
            self.progress = Progress(*columns, left, console=console)
            self.task = self.progress.add_task("", total=steps, completed=done)

    def __enter__(self):
        if self.progress is not None:
            self.progress.start()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.progress is not None:
            self.progress.stop()
        if self.board is not None:
            self.board.close()
        self.file.close()

    def step(self, metrics: StepMetrics) -> None:
        self._write(asdict(metrics))
        text = f"loss {metrics.loss:.4f}  norm {metrics.grad_norm:.3f}  {metrics.tokens_per_s:,.0f} tokens/s"
        if metrics.skipped:
            text += "  skipped"
        if metrics.expert_load is not None:
            text += f"  expert load {metrics.expert_load:.2f}"
        if metrics.communication_share is not None:
            text += f"  exchange {metrics.communication_share:.0%}"
        if metrics.indexer_loss is not None:
            text += f"  indexers {metrics.indexer_loss:.4f}"
        if self.progress is not None:
            self.progress.update(self.task, completed=metrics.step, description=text)
        else:
            self.say(f"step {metrics.step}/{self.steps}  {text}  lr {metrics.lr:.2e}")

    def evaluation(self, step: int, loss: float) -> None:
        self._write({"step": step, "eval_loss": loss})
        self.say(f"step {step}/{self.steps}  held-out loss {loss:.4f}")

    def say(self, text: str) -> None:
        """A line of its own, above the progress bar where there is one."""
        self.console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _write(self, values: dict[str, Any]) -> None:
        """What is not finite becomes null, since JSON has no word for it."""
        values = _finite(values)
        self.file.write(json.dumps(values) + "\n")
        self.file.flush()
        if self.board is not None:
            flat = {n: v for n, v in values.items() if not isinstance(v, dict)}
            for group, parts in values.items():
                flat |= {f"{group}/{n}": v for n, v in parts.items()} if isinstance(parts, dict) else {}
            for name, value in flat.items():
                if name != "step" and value is not None:
                    self.board.add_scalar(name, value, values["step"])


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _finite(part) for name, part in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


def read_metrics(run: Path) -> list[dict[str, Any]]:
    """All records of the run's metrics.jsonl. A last line that was cut off by a crash is left out."""
    records = []
    if (run / FILE).is_file():
        for line in (run / FILE).read_text().splitlines():
            with suppress(ValueError):
                records.append(json.loads(line))
    return records


def summarise(run: Path) -> dict[str, Any]:
    """The number of the last step, how many steps were skipped (no finite loss or norm: the weights did not change),
    first and last losses, mean speed without the first step (it warms up), and peak memory of a run."""
    records = read_metrics(run)
    steps = [record for record in records if "loss" in record]
    losses = [record["loss"] for record in steps if record["loss"] is not None]
    evals = [record["eval_loss"] for record in records if "eval_loss" in record]
    timed = steps[1:] or steps
    seconds = math.fsum(record["tokens"] / record["tokens_per_s"] for record in timed)
    return {
        "steps": steps[-1]["step"] if steps else 0,
        "skipped": sum(bool(record.get("skipped")) for record in steps),
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "eval_first": evals[0] if evals else None,
        "eval_last": evals[-1] if evals else None,
        "tokens_per_s": sum(record["tokens"] for record in timed) / seconds if seconds else None,
        "peak_bytes": max((record["peak_bytes"] for record in steps), default=None),
    }


def _drop_after(file: Path, done: int) -> None:
    kept = [record for record in read_metrics(file.parent) if done and record["step"] <= done]
    partial = file.with_suffix(".partial")
    partial.write_text("".join(json.dumps(record) + "\n" for record in kept))
    partial.replace(file)


def _tensorboard(folder: Path, done: int):
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=done + 1 if done else None)
