"""Runs a function on several processes that form a gloo group. A rank that hangs or dies is a failure, not a wait.

    losses = harness.run(ranks.loss_of, 4, checkpoint, timeout=30)     # [result of rank 0, ..., of rank 3]

Processes come from a fork server that has torch loaded: tenths of a second for four. Functions and results travel by
pickle, so a function lives in an importable module of tests/ (a test file itself is not importable).
"""

import multiprocessing as mp
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

PRELOAD = [
    "pytest",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "torch.distributed.checkpoint.state_dict",
    "torch._dynamo",
    "dayzero.runtime.load",
    "dayzero.runtime.lora",
    "dayzero.runtime.package",
    "dayzero.runtime.train",
]


class RankError(AssertionError):
    """What went wrong on which ranks."""


def run(fn: Callable[..., Any], world: int, *args: Any, timeout: float = 60) -> list[Any]:
    """fn(*args) on `world` ranks, one thread each; returns their results in rank order.

    Raises RankError with the traceback of every rank that failed and the numbers of those that did not answer within
    `timeout` seconds.
    """
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        processes = [
            context.Process(
                target=_rank, args=(fn, args, rank, world, str(Path(folder) / "rendezvous"), pipes[rank][1])
            )
            for rank in range(world)
        ]
        for process, (_, sender) in zip(processes, pipes, strict=True):
            process.start()
            sender.close()
        try:
            answers = _collect([receiver for receiver, _ in pipes], timeout)
        finally:
            for process in processes:
                process.kill()
                process.join()
    failed = [f"rank {rank}: {answers[rank][1]}" for rank in sorted(answers) if not answers[rank][0]]
    if silent := sorted(set(range(world)) - answers.keys()):
        failed.append(f"no answer from ranks {silent} within {timeout} s")
    if failed:
        raise RankError("\n".join(failed))
    return [answers[rank][1] for rank in range(world)]


def _collect(receivers: list[Connection], timeout: float) -> dict[int, tuple[bool, Any]]:
    answers: dict[int, tuple[bool, Any]] = {}
    deadline = time.monotonic() + timeout
    waiting = {receiver: rank for rank, receiver in enumerate(receivers)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for receiver in wait(list(waiting), left):
            rank = waiting.pop(receiver)
            try:
                answers[rank] = pickle.loads(receiver.recv_bytes())
            except EOFError:
                answers[rank] = (False, "the process died without an answer")
        if any(not ok for ok, _ in answers.values()):
            deadline = min(deadline, time.monotonic() + 1)  # the others may be stuck in a collective with it
    return answers


def _rank(fn, args, rank: int, world: int, rendezvous: str, sender: Connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.pop("RANK", None)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    try:
        answer = pickle.dumps((True, fn(*args)))
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    sender.send_bytes(answer)
    with suppress(Exception):
        dist.barrier()
        dist.destroy_process_group()
    os._exit(0)
