"""The run as a graph: read, specify, plan, align, generate. Every step is deterministic; its state is kept on disk, so
that a run that was killed goes on where it stopped.

The graph's state is small plain data; what the steps make lies beside it as JSON files.
"""

import contextlib
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

from pydantic import BaseModel

from dayzero.onboard.align import Alignment
from dayzero.onboard.align.climb import climb
from dayzero.onboard.checkpoint import Checkpoint, read_checkpoint
from dayzero.onboard.generate import VERSION, render_package
from dayzero.onboard.inspect.classify import Ledger
from dayzero.onboard.install import install, read_decisions
from dayzero.onboard.lifted_operators import custom_operators
from dayzero.onboard.prove.proven import NotProven
from dayzero.onboard.report.report import Findings
from dayzero.onboard.specify import Specification
from dayzero.onboard.specify_checkpoint import specify_checkpoint
from dayzero.runtime.config import TrainConfig
from dayzero.runtime.errors import InputError
from dayzero.runtime.plan import Plan, make_plan

STEPS = ("read", "specify", "plan", "align", "generate")


class Stopped(Exception):
    """The run was interrupted; its state is kept."""


class State(TypedDict, total=False):
    """The graph's state. request identifies the inputs; unproven, if not empty, is why there is no package."""

    request: dict[str, Any]
    unproven: list[dict[str, Any]]


class Progress(BaseModel):
    """What a step reports: its name, a line, and how far it is where that is known."""

    step: str
    line: str = ""
    done: int | None = None
    total: int | None = None


class Outcome(BaseModel):
    """What became of a run. unproven: why there is no package, [] if there is one. unverified: why nothing of it was
    compared with a reference, "" where it was."""

    package: Path
    ledger: Ledger | None
    alignment: Alignment
    unproven: list[dict[str, Any]]
    unverified: str = ""


class Run:
    """One request: which checkpoint, where to, for what cluster. Paths of what the steps leave for one another."""

    def __init__(self, checkpoint: Path, out: Path, name: str, devices: int, hbm: float, align: bool = True):
        self.checkpoint, self.target = checkpoint, out / name
        self.name, self.devices, self.hbm, self.align = name, devices, hbm, align
        self.state = out / ".state" / name
        self._read: Checkpoint | None = None
        self.stopped = threading.Event()

    def read(self) -> Checkpoint:
        """The checkpoint's headers, read once a process: half a million of them are read as fast as they would be
        loaded from a copy, and a copy could be of another day."""
        if self._read is None:
            self._read = read_checkpoint(self.checkpoint)
        return self._read

    def request(self, identity: dict[str, Any]) -> dict[str, Any]:
        """What must be the same for an interrupted run to go on."""
        return {
            "version": VERSION,
            "checkpoint": identity,
            "path": str(self.checkpoint),
            "devices": self.devices,
            "hbm": self.hbm,
            "align": self.align,
            "decisions": read_decisions(self.target),
        }

    def save(self, name: str, value: BaseModel) -> None:
        self.state.mkdir(parents=True, exist_ok=True)
        (self.state / f"{name}.json").write_text(value.model_dump_json())

    def load(self, name: str, kind: Any) -> Any:
        return kind.model_validate_json((self.state / f"{name}.json").read_text())


def _graph(run: Run) -> Any:
    """The StateGraph, not yet compiled."""
    from langgraph.config import get_stream_writer
    from langgraph.graph import END, START, StateGraph

    def teller(step: str) -> Callable[[str], None]:
        write = get_stream_writer()

        def tell(line: str) -> None:
            if run.stopped.is_set():
                raise Stopped
            write(Progress(step=step, line=line).model_dump())

        return tell

    def counter(step: str) -> Callable[[int, int], None]:
        write = get_stream_writer()

        def count(done: int, total: int) -> None:
            if run.stopped.is_set():
                raise Stopped
            write(Progress(step=step, done=done, total=total).model_dump())

        return count

    def read(state: State) -> State:
        checkpoint = run.read()
        teller("read")(f"{len(checkpoint.headers)} tensors, {checkpoint.architecture}")
        return {}

    def prove(state: State) -> State:
        checkpoint = run.read()
        try:
            specification, ledger = specify_checkpoint(
                checkpoint, run.name, state.get("request", {})["decisions"], teller("specify")
            )
        except NotProven as error:
            return {"unproven": [vars(item) for item in error.unproven]}
        run.save("specification", specification)
        run.save("ledger", ledger)
        return {}

    def plan(state: State) -> State:
        config, spec = TrainConfig(), run.load("specification", Specification).spec
        made = make_plan(
            spec,
            devices=run.devices,
            hbm_gib=run.hbm,
            mode=config.train.mode,
            tokens_per_device=config.data.tokens_per_rank,
            lora_rank=config.lora.rank,
            precision=config.train.precision,
        )
        run.save("plan", made)
        return {}

    def align(state: State) -> State:
        alignment = Alignment()
        if run.align:
            alignment = climb(
                run.read(),
                run.load("specification", Specification),
                run.load("ledger", Ledger),
                teller("align"),
                counter("align"),
                run.target / "custom",
            )
        run.save("alignment", alignment)
        return {}

    def generate(state: State) -> State:
        specification = run.load("specification", Specification)
        findings = Findings(
            interventions=specification.interventions,
            claims=specification.claims,
            replaced=specification.replaced,
            ignored_config=state.get("request", {})["decisions"].get("ignore_config") or {},
            custom=custom_operators(run.target / "custom", specification.spec) if run.align else {},
        )
        alignment = run.load("alignment", Alignment).bounded()
        files = render_package(
            specification.spec,
            run.load("ledger", Ledger),
            run.load("plan", Plan),
            TrainConfig(),
            findings,
            alignment,
            specification.shrunk,
        )
        install(run.target, files, run.read().path)
        return {}

    graph = StateGraph(State)
    for name, node in zip(STEPS, (read, prove, plan, align, generate), strict=True):
        graph.add_node(name, node)
    graph.add_edge(START, "read")
    graph.add_edge("read", "specify")
    graph.add_conditional_edges("specify", lambda state: END if state.get("unproven") else "plan", ["plan", END])
    graph.add_edge("plan", "align")
    graph.add_edge("align", "generate")
    graph.add_edge("generate", END)
    return graph


def execute(run: Run) -> Iterator[Progress | Outcome]:
    """Runs or resumes, reporting progress; the last item is the outcome. Raises InputError for bad input, and then
    leaves nothing behind; an interruption leaves the state from which the same command goes on."""
    from langgraph.checkpoint.sqlite import SqliteSaver

    identity = run.read().identity().model_dump(mode="json")
    request = run.request(identity)
    run.state.mkdir(parents=True, exist_ok=True)
    config: Any = {"configurable": {"thread_id": run.name}}
    try:
        with SqliteSaver.from_conn_string(str(run.state / "graph.sqlite")) as saver, _interruptible(run):
            graph = _graph(run).compile(checkpointer=saver)
            state = graph.get_state(config)
            # Not state.next: it is empty where a step finished after the interruption but before it was counted.
            resumes = bool(state.tasks) and state.values.get("request") == request
            if resumes:
                yield Progress(step=state.tasks[0].name, line="going on where the last run stopped")
            else:
                saver.delete_thread(run.name)
            stream = graph.stream(
                None if resumes else {"request": request, "unproven": []},
                config,
                stream_mode=["updates", "custom"],
                durability="sync",
            )
            for mode, item in stream:
                if run.stopped.is_set():
                    raise Stopped
                if mode == "custom":
                    yield Progress.model_validate(item)
                else:
                    yield Progress(step=next(iter(item)), line="done")
            unproven = graph.get_state(config).values.get("unproven") or []
        alignment = Alignment() if unproven else run.load("alignment", Alignment)
        ledger = None if unproven else run.load("ledger", Ledger)
        unverified = "" if unproven else run.load("specification", Specification).unverified
    except Stopped:
        raise KeyboardInterrupt from None
    except InputError:
        _forget(run)
        raise
    _forget(run)
    yield Outcome(package=run.target, ledger=ledger, alignment=alignment, unproven=unproven, unverified=unverified)


@contextlib.contextmanager
def _interruptible(run: Run) -> Iterator[None]:
    """An interruption ends the step that is running at its next line; a second one ends the process at once.

    Nothing is raised where the signal happens to arrive: this thread and the step's share queues, and an exception that
    comes while one of their locks is held would leave the other waiting for it.
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before in {None, signal.SIG_IGN}:
        yield
        return

    def stop(number: int, frame: Any) -> None:
        if run.stopped.is_set():
            os._exit(130)
        run.stopped.set()

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _forget(run: Run) -> None:
    shutil.rmtree(run.state, ignore_errors=True)
    for folder in (run.state.parent, run.target.parent):
        if folder.is_dir() and not any(folder.iterdir()):
            folder.rmdir()
