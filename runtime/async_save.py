"""Saves while training goes on: the state is copied, and a thread writes the copy."""

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dayzero.runtime import checkpointing, config
from dayzero.runtime.checkpointing import State, state_of
from dayzero.runtime.optimizer import Optimizer


class Saver:
    """Writes the checkpoints of a run, one at a time. Every rank has one; use it in a `with` block.

    A save costs a step the time of a copy; the next one waits for it. A periodic save that fails is told by `say`, and
    training goes on from the checkpoint before it; if the last one failed, leaving the block raises OSError.
    """

    def __init__(self, run: Path, settings: config.Checkpoint, say: Callable[[str], Any]):
        self.run, self.settings, self.say = run, settings, say
        # The thread's collectives must not mix with those of the steps.
        self.group: Any = dist.new_group(backend="gloo") if settings.asynchronous else None
        self.copies: State = {}
        self.thread: threading.Thread | None = None
        self.failure: OSError | None = None
        self.error: BaseException | None = None

    def save(self, step: int, model: nn.Module, optimizer: Optimizer, held_out_loss: float | None = None) -> None:
        """The state as it is now becomes the checkpoint of `step`; with asynchronous saves, some time after this."""
        self.wait()
        state = state_of(model, optimizer)
        if self.settings.asynchronous:
            self._copy(state)
            self.thread = threading.Thread(target=self._write, args=(step, self.copies, held_out_loss), daemon=True)
            self.thread.start()
        else:
            self._write(step, state, held_out_loss)

    def wait(self) -> None:
        """Returns when no save is on its way."""
        if self.thread is not None:
            self.thread.join()
            self.thread = None
        if self.error is not None:
            raise self.error
        if self.failure is not None:
            self.say(f"training goes on without a checkpoint: {self.failure}")
            self.failure = None

    def __enter__(self):
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: Any) -> None:
        """After an error on this rank alone, others may not come: what is on its way is left to them, and to nobody if
        they do not finish it."""
        alone = dist.get_world_size() == 1
        if kind is not None and not alone and not getattr(kind, "on_all_ranks", False):
            return
        if self.thread is not None:
            self.thread.join()
        if kind is None and (self.error or self.failure):
            raise self.error or self.failure  # type: ignore[misc]

    def _write(self, step: int, state: State, held_out_loss: float | None) -> None:
        keep, keep_best = self.settings.keep, self.settings.keep_best
        try:
            checkpointing.write(self.run, step, state, keep, keep_best, held_out_loss, self.group)
        except OSError as error:
            self.failure = error
        except BaseException as error:  # raised again where the thread is waited for
            self.error = error

    @torch.no_grad()
    def _copy(self, state: State) -> None:
        """Into host memory, which the next save uses again."""
        for name, value in state.items():
            if name in self.copies:
                _part(self.copies[name]).copy_(_part(value), non_blocking=True)
            else:
                self.copies[name] = value.detach().to("cpu", copy=True)
        for device in {value.device for value in state.values()}:
            if device.type != "cpu":
                torch.get_device_module(device).synchronize()


def _part(value: Tensor) -> Tensor:
    return value.to_local() if isinstance(value, DTensor) else value
