"""A request to stop: the step that is under way is finished, a checkpoint is written, and the run ends well."""

import signal
import threading
from typing import Protocol

import torch
import torch.distributed as dist


class Request(Protocol):
    def is_set(self) -> bool: ...


def on_sigterm() -> threading.Event:
    """Set when SIGTERM arrives at this process; a second one ends it. Call it in the main thread."""
    request = threading.Event()

    def note(number: int, frame: object) -> None:
        request.set()
        signal.signal(signal.SIGTERM, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, note)
    return request


def agreed(request: Request | None, device: torch.device) -> bool:
    """Whether any rank was asked to stop: the same answer on all, which ask after the same step."""
    asked = torch.tensor(int(request is not None and request.is_set()), device=device)
    dist.all_reduce(asked, dist.ReduceOp.MAX)
    return bool(asked)
