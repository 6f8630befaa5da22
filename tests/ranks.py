"""Functions that tests send to the ranks of tests/harness.py."""

import os
import time
from pathlib import Path

import torch
import torch.distributed as dist


def rank_and_sum(value: int) -> tuple[int, int]:
    total = torch.tensor(value * (dist.get_rank() + 1))
    dist.all_reduce(total)
    return dist.get_rank(), int(total)


def misbehave(rank: int, how: str) -> None:
    """The given rank raises, dies or hangs; the others wait for it in a collective."""
    if dist.get_rank() == rank:
        if how == "raise":
            raise ValueError("rank went wrong")
        if how == "die":
            os._exit(9)
        time.sleep(60)
    dist.barrier()


def expert_parallel(cases: dict[str, tuple[Path, dict]]) -> dict[str, dict]:
    """Worst relative errors of sharded models against one process, by name of the case. See test_parallel.py."""
    import exactness

    return {name: exactness.compare(folder, **case) for name, (folder, case) in cases.items()}
