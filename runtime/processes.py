"""The process group of a run, on whatever device there is."""

import datetime
import json
import os
import time
import uuid

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from dayzero.runtime.malloc import keep_freed_memory

BACKENDS = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}


def device_type() -> str:
    """ "cuda", "npu" or "cpu": the best that is there."""
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)  # where torch_npu is installed, torch loads it by itself
    return "npu" if npu is not None and npu.is_available() else "cpu"


def join(timeout_minutes: float = 30.0) -> torch.device:
    """Joins the group that the environment describes, or forms one of this process alone. Returns its device.

    timeout_minutes: how long a collective waits for the other ranks.
    """
    kind = device_type()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank)
    if kind != "cpu":
        torch.get_device_module(device).set_device(device)
    else:
        share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", max(1, share))))
        keep_freed_memory()
    if dist.is_initialized():
        return device
    if "RANK" not in os.environ:
        dist.init_process_group(BACKENDS[kind], store=HashStore(), rank=0, world_size=1)
        return device
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = datetime.timedelta(minutes=timeout_minutes)
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        agent = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, False, timeout)
        store = PrefixStore(incarnation(agent, rank, world, timeout.total_seconds()), agent)
        dist.init_process_group(BACKENDS[kind], store=store, rank=rank, world_size=world, timeout=timeout)
    else:
        dist.init_process_group(BACKENDS[kind], rank=rank, world_size=world, timeout=timeout)
    return device


def incarnation(store: Store, rank: int, world: int, timeout: float) -> str:
    """A name that exactly the processes that call this together get, though `store` remembers those before them.

    The store of torchrun's agent outlives a restart, and without a prefix of their own the new processes would read
    the addresses of the dead ones. The restart count of the environment will not do: each node's agent counts its own.
    So rank 0 offers a fresh name, every rank answers it with a word of its own, and rank 0 confirms with all words. A
    rank that finds an old offer does not find its word confirmed, and looks again. Raises TimeoutError.
    """
    end, word = time.monotonic() + timeout, uuid.uuid4().hex
    if rank == 0:
        store.set("offer", word)
        answers = [f"answer/{word}/{other}" for other in range(1, world)]
        if answers:
            store.wait(answers, datetime.timedelta(seconds=timeout))
        store.set(f"confirmed/{word}", json.dumps([store.get(answer).decode() for answer in answers]))
        return word
    offered = ""
    while time.monotonic() < end:
        if store.check(["offer"]):
            offered = store.get("offer").decode()
            store.set(f"answer/{offered}/{rank}", word)
            confirmed = f"confirmed/{offered}"
            if store.check([confirmed]) and word in json.loads(store.get(confirmed)):
                return offered
        time.sleep(0.05)
    raise TimeoutError(f"rank {rank}: rank 0 did not form a group within {timeout:.0f} s; is it still starting?")


def peak_bytes(device: torch.device) -> int:
    """The most memory this process has had allocated on its device; on a CPU, its largest resident size."""
    if device.type == "cpu":
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return int(torch.get_device_module(device).max_memory_allocated(device))


def device_gib() -> float | None:
    """Memory of this machine's accelerator, None on a CPU."""
    kind = device_type()
    if kind == "cpu":
        return None
    return torch.get_device_module(kind).get_device_properties(0).total_memory / 2**30
