"""The process group of a run, on whatever device there is."""

import datetime
import os

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

TIMEOUT = datetime.timedelta(minutes=30)
BACKENDS = {"cuda": "nccl", "npu": "hccl", "cpu": "gloo"}


def device_type() -> str:
    """ "cuda", "npu" or "cpu": the best that is there."""
    if torch.cuda.is_available():
        return "cuda"
    npu = getattr(torch, "npu", None)  # where torch_npu is installed, torch loads it by itself
    return "npu" if npu is not None and npu.is_available() else "cpu"


def join() -> torch.device:
    """Joins the group that the environment describes, or forms one of this process alone. Returns its device."""
    kind = device_type()
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, local_rank)
    if kind != "cpu":
        torch.get_device_module(device).set_device(device)
    else:
        share = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", max(1, share))))
    if dist.is_initialized():
        return device
    if "RANK" not in os.environ:
        dist.init_process_group(BACKENDS[kind], store=HashStore(), rank=0, world_size=1)
        return device
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        # The agent's store outlives a restart: without a prefix of their own, the new processes would read the
        # addresses of the dead ones.
        agent = TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), world, False, TIMEOUT)
        store = PrefixStore(f"restart{os.environ['TORCHELASTIC_RESTART_COUNT']}", agent)
        dist.init_process_group(BACKENDS[kind], store=store, rank=rank, world_size=world, timeout=TIMEOUT)
    else:
        dist.init_process_group(BACKENDS[kind], rank=rank, world_size=world, timeout=TIMEOUT)
    return device


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
