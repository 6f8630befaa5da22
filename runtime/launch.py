"""Processes: joins those of a launcher that is already there, else starts them, and says in a line what went wrong."""

import logging
import multiprocessing as mp
import os
import select
import shutil
import signal
import sys
import threading
import time
import traceback
from contextlib import suppress
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from dayzero.runtime import checkpointing, flight_recorder
from dayzero.runtime.errors import InputError, RunFailed
from dayzero.runtime.job import Job

WORKER_MODULES = ["dayzero.runtime.train", "torch._dynamo"]
SIGNALS = "SIGINT,SIGHUP,SIGQUIT"  # that end all ranks at once; SIGTERM lets them save
SHUTDOWN_SECONDS = "5"  # that a rank has to end once another has failed


def world_size(nproc: int) -> int:
    """Ranks of the run: those of the launcher that started this process, else `nproc`."""
    return int(os.environ.get("WORLD_SIZE", nproc)) if launched() else nproc


def launched() -> bool:
    """Whether a launcher such as torchrun started this process as one rank of several."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def start_server() -> None:
    """Starts the process that ranks fork from, which imports torch once for all of them; it takes its seconds while the
    caller reads data. It touches no accelerator."""
    forkserver.set_forkserver_preload(WORKER_MODULES)
    forkserver.ensure_running()


def run(job: Job, nproc: int, restarts: int = 0) -> None:
    """Trains. Returns in the parent, or in each rank of an outer launcher, when all is done.

    restarts: how often processes that fail are started again from the last checkpoint. After SIGTERM the ranks write a
    checkpoint and all is done. Raises RunFailed, or InputError for what only a rank can see.
    """
    if launched() or nproc == 1:
        _run_here(job)
    else:
        _run_processes(job, nproc, restarts)


def _run_here(job: Job) -> None:
    from dayzero.runtime import stopping

    try:
        _train(job, stopping.on_sigterm() if threading.current_thread() is threading.main_thread() else None)
    except KeyboardInterrupt:
        raise _interrupted(job) from None
    except InputError:
        raise
    except Exception as error:
        raise _failed(job, int(os.environ.get("RANK", "0")), f"{type(error).__name__}: {error}") from None


def _run_processes(job: Job, nproc: int, restarts: int) -> None:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in list(logging.root.manager.loggerDict):
        if name.startswith("torch.distributed"):
            logging.getLogger(name).setLevel(logging.CRITICAL)
    os.environ.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", SHUTDOWN_SECONDS)
    start_server()
    stop = mp.get_context("forkserver").Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    scratch = _logs(job) / "launcher"
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=nproc,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        run_id=job.run.name,
        max_restarts=restarts,
        monitor_interval=0.2,
        start_method="forkserver",
        signals_to_handle=SIGNALS,
        logs_specs=DefaultLogsSpecs(log_dir=str(scratch)),
    )
    try:
        elastic_launch(config, _rank)(job, os.getpid(), stop)
    except (SignalException, KeyboardInterrupt):
        raise _interrupted(job) from None
    except ChildFailedError as error:
        failures = sorted(error.failures.items(), key=lambda item: item[1].timestamp)
        if any(failure.exitcode == -signal.SIGINT for _, failure in failures):
            raise _interrupted(job) from None
        # A rank that was killed makes its neighbours raise, often before its own death is noticed.
        killed = [item for item in failures if item[1].exitcode < 0 and item[1].exitcode != -signal.SIGTERM]
        rank, failure = (killed or failures)[0]
        if killed:
            name = signal.Signals(-failure.exitcode).name
            log = _log_file(job, rank)
            timeout = flight_recorder.nccl_timeout(log.read_text(errors="replace")) if log.is_file() else ""
            hint = f" ({timeout})" if timeout else " (out of memory?)" if name == "SIGKILL" else ""
            raise _failed(job, rank, f"ended by {name}{hint}") from None
        message: Any = failure.message  # a dict if the rank raised, which torch's types do not say
        raise _failed(job, rank, message["message"] if isinstance(message, dict) else message) from None
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _rank(job: Job, launcher: int, stop: Any) -> None:
    """The body of a process that we started."""
    threading.Thread(target=_end_with, args=(launcher,), daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # the parent speaks for all; checkpoints survive any death
    rank = int(os.environ["RANK"])
    log = _log_file(job, rank).open("a", buffering=1)
    os.dup2(log.fileno(), sys.stderr.fileno())
    if rank:
        os.dup2(log.fileno(), sys.stdout.fileno())
    print(f"rank {rank}: process {os.getpid()}", file=log)
    try:
        _train(job, stop)
    except BaseException as error:
        traceback.print_exc()
        if flight_recorder.is_collective_error(error):
            flight_recorder.tell()
            time.sleep(1)  # the launcher reports what it sees first: let that be the neighbour's own end
        raise


def _end_with(launcher: int) -> None:
    """Ends this process when the launcher has ended: one that is killed leaves no rank behind on the device."""
    if hasattr(os, "pidfd_open"):
        with suppress(ProcessLookupError):
            select.select([os.pidfd_open(launcher)], [], [])
        os.kill(os.getpid(), signal.SIGKILL)


def _train(job: Job, stop: Any) -> None:
    """Joins the group, trains, and leaves the group; a group of one is left after a failure too.

    stop: a request to stop, see stopping.py.
    """
    import dataclasses

    import torch.distributed as dist

    from dayzero.runtime.processes import join
    from dayzero.runtime.train import train

    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
        job = dataclasses.replace(job, resume=True)
    own_group = not dist.is_initialized()
    flight_recorder.enable(_logs(job))
    device = join(job.config.train.timeout)
    try:
        dist.barrier()  # rank 0 has written what the others are about to read
        train(job, device, stop)
        dist.barrier()
    except BaseException as error:
        own_group = own_group and dist.get_world_size() == 1  # with others, leaving could wait for them
        if flight_recorder.is_collective_error(error) and flight_recorder.timed_out(error):
            raise flight_recorder.Hung(flight_recorder.explain(error)) from error
        raise
    finally:
        if own_group:
            dist.destroy_process_group()


def _logs(job: Job) -> Path:
    folder = job.run / "logs"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _log_file(job: Job, rank: int) -> Path:
    return _logs(job) / f"rank_{rank}.log"


def _interrupted(job: Job) -> RunFailed:
    return RunFailed(f"interrupted; {_last_checkpoint(job)}", 130)


def _failed(job: Job, rank: int, cause: str) -> Exception:
    """`cause`: "Type: text", as a rank reported it."""
    kind, _, text = cause.partition(": ")
    if kind == "InputError":
        return InputError(text)
    if kind == "Diverged":
        return RunFailed(f"{text}\n  {_last_checkpoint(job)}")
    cause = cause.splitlines()[0][:300] if cause else "unknown"
    log = _log_file(job, rank)
    if sys.exc_info()[2] is not None and not log.exists():
        log.write_text(traceback.format_exc())
    return RunFailed(f"rank {rank}: {cause}\n  log  {log}\n  {_last_checkpoint(job)}")


def _last_checkpoint(job: Job) -> str:
    found = checkpointing.checkpoints(job.run)
    if not found:
        return f"no checkpoint yet in {job.run}"
    return f"last checkpoint {found[0]}, continue with --resume --run {job.run}"
