"""What a rank waited for when a collective took too long: from torch's flight recorder, which keeps the latest ones."""

import os
import pickle
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

TIMED_OUT = re.compile(r"timed? ?out", re.IGNORECASE)
LOST = ("Connection closed by peer", "Connection reset", "Broken pipe", "NCCL communicator was aborted")
HERE = str(Path(__file__).parent)


class Hung(Exception):
    """A collective that not all ranks came to."""


def enable(logs: Path) -> None:
    """Has NCCL write its record to `logs` when it ends a process. Call it before the group is formed."""
    os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "2000")
    for name in ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        os.environ.setdefault(name, str(logs / "flight_recorder_rank_"))


def is_collective_error(error: BaseException) -> bool:
    return isinstance(error, RuntimeError) and (timed_out(error) or any(word in str(error) for word in LOST))


def timed_out(error: BaseException) -> bool:
    return TIMED_OUT.search(str(error)) is not None


def last_collective() -> str:
    """The latest collective of this process and where it was called, "" where nothing is recorded."""
    entries: list[dict[str, Any]] = []
    with suppress(Exception):
        from torch._C._distributed_c10d import _dump_fr_trace  # type: ignore[attr-defined]

        entries = pickle.loads(_dump_fr_trace()).get("entries", [])
    entries = [entry for entry in entries if not entry.get("retired")] or entries
    if not entries:
        return ""
    entry = max(entries, key=lambda entry: entry["record_id"])
    name = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
    _, group = (*entry["process_group"], "")[:2]
    at = next((f for f in entry.get("frames", []) if f["filename"].startswith(HERE)), None)
    where = f", called at {Path(at['filename']).name}:{at['line']}" if at else ""
    return f"{name} of {entry['input_sizes']} {'/'.join(entry['input_dtypes'])} in group {group or 'default'}{where}"


def explain(error: BaseException, wait: float = 3.0) -> str:
    """Who waited for what, and which ranks did not come. All ranks whose collective failed call it, at about the same
    time; `wait`: seconds that they look for one another."""
    mine = last_collective() or "a collective"
    told: dict[int, str] = {}
    thread = threading.Thread(target=_exchange, args=(mine, told, wait), daemon=True)
    thread.start()
    thread.join(wait + 2)
    missing = sorted(set(range(dist.get_world_size())) - told.keys())
    elsewhere = {rank: text for rank, text in told.items() if text != mine}
    lines = [f"{mine} timed out"]
    if told and missing:
        lines.append(f"ranks that did not come: {', '.join(map(str, missing[:16]))}")
    lines += [f"rank {rank} was at {text}" for rank, text in sorted(elsewhere.items())[:4]]
    return "; ".join(lines)


def tell() -> None:
    """Lets the others know that this rank is alive and where it stopped. For ranks that were left by another."""
    with suppress(Exception):
        _store().set(f"stopped/{dist.get_rank()}", last_collective())


def _exchange(mine: str, told: dict[int, str], wait: float) -> None:
    """Runs in a thread of its own: the store may be with a rank that hangs."""
    with suppress(Exception):
        store = _store()
        store.set(f"stopped/{dist.get_rank()}", mine)
        told[dist.get_rank()] = mine
        end = time.monotonic() + wait
        while len(told) < dist.get_world_size() and time.monotonic() < end:
            for rank in set(range(dist.get_world_size())) - told.keys():
                if store.check([f"stopped/{rank}"]):
                    told[rank] = store.get(f"stopped/{rank}").decode()
            time.sleep(0.1)


def _store() -> Any:
    return dist.distributed_c10d._get_default_store()


def nccl_timeout(log: str) -> str:
    """What NCCL's watchdog wrote into a rank's log before it ended the process, in short; "" if it did not."""
    lines = [line for line in log.splitlines() if "collective operation timeout: " in line]
    if not lines:
        return ""
    kind, size, took = (
        re.search(pattern, lines[-1]) for pattern in (r"OpType=(\w+)", r"NumelIn=(\d+)", r"ran for (\d+) milliseconds")
    )
    text = f"{kind[1].lower() if kind else 'a collective'} of {size[1] if size else '?'} elements timed out"
    return text + (f" after {int(took[1]) / 1000:.0f} s" if took else "")
