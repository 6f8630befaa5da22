"""Shows a run while it works: a line that moves on a terminal, plain lines elsewhere."""

from collections.abc import Iterable
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from dayzero.onboard.agent import STEPS
from dayzero.onboard.agent import Progress as Event


def show(events: Iterable[Any], console: Console) -> Any:
    """Consumes the events of a run and returns the last one, its outcome."""
    return _moving(events, console) if console.is_terminal else _plain(events, console)


def _plain(events: Iterable[Any], console: Console) -> Any:
    last = None
    for event in events:
        last = event
        if isinstance(event, Event) and event.line:
            number = STEPS.index(event.step) + 1 if event.step in STEPS else 0
            line = f"[{number}/{len(STEPS)}] {event.step}: {event.line}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return last


def _moving(events: Iterable[Any], console: Console) -> Any:
    last = None
    columns = (SpinnerColumn(), TextColumn("{task.fields[step]:<9}"), BarColumn(24), TimeElapsedColumn())
    with Progress(*columns, TextColumn("{task.description}"), console=console) as progress:
        tasks = {}
        for event in events:
            last = event
            if not isinstance(event, Event):
                continue
            if event.step not in tasks:
                tasks[event.step] = progress.add_task("", total=None, step=event.step)
            task = tasks[event.step]
            if event.done is not None:
                progress.update(task, completed=event.done, total=event.total)
            if event.line == "done":
                progress.update(task, completed=1, total=1, description="")
            elif event.line:
                width = max(console.width - 54, 12)
                progress.update(task, description=event.line[:width])
    return last
