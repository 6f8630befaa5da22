"""Collectives that travel while others compute, in the forward and in the backward pass.

    travelling = leave(x, flight)     # returns at once
    ...                               # what computes meanwhile
    arrived = land(travelling, flight)

In the backward pass `land` sends the gradient off and `leave` waits for it. Autograd runs what was recorded last first,
so whatever stood between the two in the forward pass stands between them again: the overlap is mirrored. torch's own
functional collectives wait for their gradients at once.
"""

import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work


class Move(Protocol):
    """A collective on rows and the one that brings gradients back."""

    def there(self, x: Tensor) -> tuple[Tensor, Work | None]: ...

    def back(self, grad: Tensor) -> tuple[Tensor, Work | None]: ...

    def reverse(self) -> "Move": ...


@dataclass(frozen=True)
class AllToAll:
    """send[r] rows go to rank r, in order; receive[r] come from it.  [sum(send), ...] -> [sum(receive), ...]."""

    send: list[int]
    receive: list[int]
    group: ProcessGroup

    def there(self, x: Tensor) -> tuple[Tensor, Work | None]:
        return self._sent(x, self.send, self.receive)

    def back(self, grad: Tensor) -> tuple[Tensor, Work | None]:
        return self._sent(grad, self.receive, self.send)

    def reverse(self) -> "AllToAll":
        return AllToAll(self.receive, self.send, self.group)

    def _sent(self, x: Tensor, send: list[int], receive: list[int]) -> tuple[Tensor, Work | None]:
        out = x.new_empty(sum(receive), *x.shape[1:])
        return out, dist.all_to_all_single(out, x, receive, send, group=self.group, async_op=True)


@dataclass(frozen=True)
class AllGather:
    """The rows of all ranks, in rank order; each has as many.  [N, ...] -> [ranks * N, ...]. The gradients of a row are
    summed over the ranks."""

    group: ProcessGroup

    def there(self, x: Tensor) -> tuple[Tensor, Work | None]:
        out = x.new_empty(x.shape[0] * self.group.size(), *x.shape[1:])
        return out, dist.all_gather_into_tensor(out, x, group=self.group, async_op=True)

    def back(self, grad: Tensor) -> tuple[Tensor, Work | None]:
        out = grad.new_empty(grad.shape[0] // self.group.size(), *grad.shape[1:])
        return out, dist.reduce_scatter_tensor(out, grad, group=self.group, async_op=True)

    def reverse(self) -> "ReduceScatter":
        return ReduceScatter(self)


@dataclass(frozen=True)
class ReduceScatter:
    """Each rank's rows, summed over the ranks.  [ranks * N, ...] -> [N, ...]."""

    gather: AllGather

    def reverse(self) -> AllGather:
        return self.gather

    def there(self, x: Tensor) -> tuple[Tensor, Work | None]:
        return self.gather.back(x)

    def back(self, grad: Tensor) -> tuple[Tensor, Work | None]:
        return self.gather.there(grad)


class Waiting:
    """The time for which computation stood still until a collective had ended."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.events: list[tuple[Any, Any]] = []

    def until(self, work: Work | None, device: torch.device) -> None:
        """Waits for `work`. On an accelerator its stream waits, not this process."""
        if work is None:
            return
        if device.type == "cpu":
            started = time.perf_counter()
            work.wait()
            self.seconds += time.perf_counter() - started
            return
        before, after = (torch.Event(device=device.type, enable_timing=True) for _ in range(2))
        before.record()
        work.wait()
        after.record()
        self.events.append((before, after))

    def take(self) -> float:
        """Seconds since the last call."""
        seconds, self.seconds = self.seconds, 0.0
        for before, after in self.events:
            after.synchronize()
            seconds += before.elapsed_time(after) / 1e3
        self.events.clear()
        return seconds


@dataclass
class Flight:
    """One journey of a tensor, and of its gradient back. sent, result, work: of the collective that is under way."""

    move: Move
    waiting: Waiting = field(default_factory=Waiting)
    sent: Tensor | None = None
    result: Tensor | None = None
    work: Work | None = None

    def start(self, x: Tensor, back: bool = False) -> Tensor:
        self.sent = x.contiguous()
        self.result, self.work = (self.move.back if back else self.move.there)(self.sent)
        return self.result

    def wait(self) -> Tensor:
        assert self.result is not None
        self.waiting.until(self.work, self.result.device)
        result, self.sent, self.result, self.work = self.result, None, None, None
        return result


def leave(x: Tensor, flight: Flight) -> Tensor:
    """What x becomes by the flight's collective, not to be read before `land`."""
    return _Leave.apply(x, flight)


def land(x: Tensor, flight: Flight) -> Tensor:
    """x, once the collective has ended."""
    return _Land.apply(x, flight)


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, flight):
        ctx.flight = flight
        return flight.start(x)

    @staticmethod
    def backward(ctx, grad):
        return ctx.flight.wait(), None  # not `grad`, which is what `land` sent off


class _Land(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, flight):
        ctx.flight = flight
        flight.wait()
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        ctx.flight.start(grad, back=True)
        return grad, None  # autograd wants a gradient of x's shape; what is on its way may have another
