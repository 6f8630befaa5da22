"""Layers that run several times with the same parameters (universal transformers, Dehghani et al. 2018,
arXiv:1807.03819), and what one pass is handed of the pass before."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

MESSAGE = "message"  # what a layer is handed of the pass before, in its wiring
Stream = Tensor | tuple[Tensor, ...]
Run = Callable[[Stream, range, Sequence[tuple[Tensor, ...]] | None], Stream]


class Loop(nn.Module):
    """Layers first .. first + count - 1 run `passes` times, one pass after the other, then the layers after them.

    restarts: every pass begins with the stream, and what was kept of it, as they were before the first one; otherwise a
    pass goes on with what the one before gave. message: makes of what the pass before kept and gave, [T, H] each, the
    values that the layers are handed in the next one, `message.queries` for each of them, in order.
    """

    def __init__(self, first: int, count: int, passes: int, restarts: bool = False, message: nn.Module | None = None):
        super().__init__()
        if first < 0 or count < 1 or passes < 1:
            raise ValueError(f"layers {first} .. {first + count - 1} cannot run {passes} times")
        if message is not None and not restarts:
            raise ValueError("a pass that is handed a message of the one before begins where that began")
        self.first, self.count, self.passes, self.restarts, self.message = first, count, passes, restarts, message

    def forward(self, x: Stream, run: Run, layers: int) -> Stream:
        """run(x, numbers, messages): those layers of `layers`, on x; messages: one tuple a layer in passes after the
        first, else None."""
        looped = range(self.first, self.first + self.count)
        before = run(x, range(self.first), None)
        x = run(before, looped, None)
        for _ in range(1, self.passes):
            x = run(before if self.restarts else x, looped, self._messages(before, x))
        return run(x, range(looped.stop, layers), None)

    def _messages(self, before: Stream, x: Stream) -> list[tuple[Tensor, ...]]:
        if self.message is None:
            return [()] * self.count
        left = x[len(before) :] if isinstance(x, tuple) else (x,)
        made, each = self.message(*left), int(self.message.queries)  # type: ignore[arg-type]
        return [tuple(made[number * each : (number + 1) * each]) for number in range(self.count)]
