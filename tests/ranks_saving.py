"""What the processes of test_saving.py do."""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import HashStore

from dayzero.runtime import checkpointing

OPERATIONS = ("open", "os.mkdir", "os.rename", "os.rmdir", "os.remove", "os.listdir", "os.scandir")


def state_at(step: int) -> dict[str, torch.Tensor]:
    """A state that says in every element which step it is of."""
    return {
        f"model.{name}": torch.full((size,), float(step)) for name, size in (("a", 40_000), ("b", 7), ("c", 90_000))
    }


def save_until_killed(run: Path, operations: int | None, ready: Path) -> None:
    """Saves one step after another; ends itself by SIGKILL before the given file operation, or waits to be killed."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    found = checkpointing.checkpoints(run)
    step = checkpointing.step_of(found[0]) if found else 0
    left = [operations]

    def count(event: str, arguments: tuple) -> None:
        if left[0] is not None and event in OPERATIONS and str(run) in str(arguments[0]):
            if left[0] == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left[0] -= 1

    sys.addaudithook(count)
    ready.touch()
    while True:
        step += 1
        checkpointing.write(run, step, state_at(step), keep=2)


def timed_saves(run: Path, count: int) -> float:
    """Seconds that one save takes."""
    start = time.perf_counter()
    for step in range(1, count + 1):
        checkpointing.write(run, step, state_at(step), keep=2)
    return (time.perf_counter() - start) / count


def fill_the_disk(run: Path) -> tuple[str, list[str]]:
    """(the error of a save for which there is no room, what is left in the folder)."""
    checkpointing.write(run, 1, state_at(1), keep=5)
    big = {"model.a": torch.ones(4_000_000)}
    try:
        checkpointing.write(run, 2, big, keep=5)
    except OSError as error:
        return str(error), sorted(path.name for path in (run / "checkpoints").iterdir())
    return "no error", []
