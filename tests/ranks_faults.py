"""What the ranks of test_faults.py do."""

import datetime
import time

import torch
import torch.distributed as dist

from dayzero.runtime import flight_recorder


def hang(rank: int) -> str:
    """The given rank stays away from a collective; the others' explanation of why theirs failed."""
    group = dist.new_group(timeout=datetime.timedelta(seconds=1))
    dist.all_reduce(torch.ones(2), group=group)
    if dist.get_rank() == rank:
        time.sleep(4.5)
        return ""
    try:
        dist.all_reduce(torch.ones(5, 3), group=group)
    except RuntimeError as error:
        if flight_recorder.is_collective_error(error):
            return flight_recorder.explain(error)
    return "nothing happened"
