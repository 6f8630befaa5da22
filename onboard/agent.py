"""The run as a graph: read, specify, plan, align, generate. Every step is deterministic; its state is kept on disk, so
that a run that was killed goes on where it stopped.

The graph's state is small plain data; what the steps make lies beside it as JSON files.
"""

import contextlib
import json
import os
import re
import shutil
import signal
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypedDict

import torch
from pydantic import BaseModel

from dayzero.onboard.align import Alignment, Rung, blocks_rung, coverage_rung, model_rung
from dayzero.onboard.align.ladder import THRESHOLDS, Float32, judge, not_compared
from dayzero.onboard.align.model import CannotLoad, real_weights_error
from dayzero.onboard.align.precision import float32_steps
from dayzero.onboard.by_rules.specify import specify_by_rules
from dayzero.onboard.checkpoint import Checkpoint, read_checkpoint
from dayzero.onboard.claims import Claim
from dayzero.onboard.config_fields import ConfigView
from dayzero.onboard.generate import VERSION, model_files, render_package
from dayzero.onboard.inspect.classify import Ledger, classify, settle
from dayzero.onboard.inspect.ledger import Finding, finding
from dayzero.onboard.inspect.unread_layouts import place_and_reason, unread_layouts
from dayzero.onboard.install import install, read_decisions, write_files
from dayzero.onboard.lifted_operators import custom_operators
from dayzero.onboard.oracle import remote_code
from dayzero.onboard.oracle.reference import UnknownArchitecture, load_config, model_class
from dayzero.onboard.prove.interventions import Intervention
from dayzero.onboard.prove.proven import NotProven, Unproven
from dayzero.onboard.report.report import Findings
from dayzero.onboard.rules.unmapped import fates
from dayzero.onboard.specify import Specification, specify
from dayzero.runtime.config import TrainConfig
from dayzero.runtime.errors import InputError
from dayzero.runtime.package import Package, load_package
from dayzero.runtime.packed import quantised_groups
from dayzero.runtime.plan import Plan, make_plan
from dayzero.runtime.spec import ModelSpec

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


def real_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Parameter shapes of the real model, without its memory."""
    with torch.device("meta"):
        return {name: tuple(parameter.shape) for name, parameter in spec.build().state_dict().items()}


def specify_checkpoint(
    checkpoint: Checkpoint, name: str, decisions: dict[str, Any], tell: Callable[[str], None]
) -> tuple[Specification, Ledger]:
    """The specification and the settled ledger. Without a reference rules decide, and nothing is proven. Raises
    NotProven for anything that stays open, InputError where config and tensors disagree."""
    if layouts := unread_layouts(checkpoint.headers):
        raise NotProven([Unproven(*place_and_reason(layout, names)) for layout, names in layouts.items()])
    if checkpoint.quantization and not quantised_groups(checkpoint.headers):
        method = str(checkpoint.quantization.get("quant_method", "an unnamed method"))
        why = f"weights are quantised ({method}), and no decoder here reads them"
        raise NotProven([Unproven("config.json: quantization_config", why)])
    ignored = decisions.get("ignore_config") or {}
    if why := _no_reference(checkpoint):
        tell(f"{why}: rules decide, and nothing is verified")
        specification = specify_by_rules(checkpoint, classify(checkpoint), name, why, ignored)
    else:
        specification = specify(checkpoint.config, checkpoint.identity(), name, tell, checkpoint.headers)
    shapes, others = real_shapes(specification.spec), fates(specification.idle, specification.tables)
    ledger = settle(classify(checkpoint), checkpoint, specification.spec, shapes, specification.towers, others)
    unread = [field for field in specification.unread if field not in ignored]
    claims = [claim for claim in specification.claims if not {claim.field, claim.field.split(".")[0]} & ignored.keys()]
    harmless = [finding for claim in claims for finding in _harmless(claim)]
    copied = "its code is copied as it is, and trains what it computes"
    harmless += [
        finding("contradiction", f"{module}: {wrong}", copied) for module, wrong in specification.contradictions.items()
    ]
    ledger = ledger.model_copy(update={"unread_config": unread, "findings": [*ledger.findings, *harmless]})
    held = ConfigView(checkpoint.config)
    open_items = [
        Unproven(f"config.json: {field} = {held.get(field)!r}"[:160], "nobody reads it: not the reference, not us")
        for field in unread
    ]
    open_items += [_contradicted(claim) for claim in claims if claim.verdict == "contradicted"]
    open_items += [
        _unexplained(tried)
        for tried in specification.interventions
        if tried.effect == "unexplained" and not {tried.field, tried.field.split(".")[0]} & ignored.keys()
    ]
    open_items += _open_tensors(ledger.unaccounted)
    if open_items:
        raise NotProven(open_items)
    return specification, ledger


def _contradicted(claim: Claim) -> Unproven:
    """What a config says of the model that the proof contradicts, and what to do about it."""
    why = (
        f"stated, and not true of the proven model ({claim.proven}). Either the config is wrong, and ignore_config in "
        f"decisions.yaml may accept {claim.field} with a reason, or the reference is not the checkpoint's"
    )
    return Unproven(f"config.json: {claim.field} = {claim.states}"[:160], why)


def _unexplained(tried: Intervention) -> Unproven:
    """A field that the reference computes with in a way that nothing proven follows, and what to do about it."""
    why = (
        f"the reference reads it, and what it does at {tried.altered!r} is no proven block ({tried.detail}). Only the "
        f"present value is proven: ignore_config in decisions.yaml may accept {tried.field} with a reason"
    )
    return Unproven(f"config.json: {tried.field} = {tried.value!r}"[:160], why)


def _harmless(claim: Claim) -> Iterator[Finding]:
    """What a config says wrongly and nothing depends on: to be known, for another reader may depend on it."""
    of = {"not the tensors'": "of the tensors", "without effect": "of the model; the reference gives it no effect"}
    if claim.verdict in of:
        what = f"{claim.field}={claim.states} is stated, and not true {of[claim.verdict]}"
        yield finding("contradiction", what, claim.proven)


def _no_reference(checkpoint: Checkpoint) -> str:
    """Why nothing could be the reference, "" where there is one. Raises NotProven where only code that came with the
    checkpoint could be it, and may not be run."""
    code = remote_code.remote_code(checkpoint.path, checkpoint.config)
    if remote_code.current() is not None:
        return ""
    try:
        model_class(load_config(checkpoint.config), list(checkpoint.config.get("architectures") or []))
    except UnknownArchitecture as error:
        if code is None:
            return str(error)
        files = ", ".join(remote_code.files_to_run(checkpoint.path, code))
        why = f"{error}; --trust-remote-code would run the checkpoint's own code in a sandbox: {files}"
        todo = "without auto_map in config.json, rules decide, and nothing of the package is verified"
        raise NotProven([Unproven("config.json: auto_map", why, todo=todo)]) from None
    return ""


def _open_tensors(names: list[str]) -> list[Unproven]:
    """Tensors without a fate, one line each where they are few, else one a pattern."""
    why = "no parameter of the proven model is made of it"
    alike: dict[str, list[str]] = {}
    for name in names:
        alike.setdefault(re.sub(r"\b\d+\b", "*", name), []).append(name)
    found: list[Unproven] = []
    for pattern, members in alike.items():
        if len(members) <= 3:
            found += [Unproven(name, why) for name in members]
        else:
            found.append(Unproven(pattern, f"{why}: {len(members)} tensors, {members[0]} first"))
    return found


def load_shrunk(specification: Specification, folder: Path, custom: Path | None = None) -> Package:
    """The shrunk package: model.py and weights.py by the same templates as the real ones, written and imported.

    custom: a folder of hand-written code, of which it runs what is for its lifted classes."""
    return _load(specification.shrunk, folder, custom)


def _load(spec: ModelSpec, folder: Path, custom: Path | None) -> Package:
    write_files(folder, model_files(spec))
    for name, there in custom_operators(custom, spec).items():
        if there and custom is not None:
            (folder / "custom").mkdir(exist_ok=True)
            shutil.copy(custom / Path(name).name, folder / name)
    return load_package(folder)


def climb(
    checkpoint: Checkpoint,
    specification: Specification,
    ledger: Ledger,
    tell: Callable[[str], None],
    count: Callable[[int, int], None] = lambda done, total: None,
    custom: Path | None = None,
) -> Alignment:
    """Rungs L0 to L2. custom: the package's folder of hand-written code, which stands in for lifted classes."""
    rungs: dict[str, Rung] = {}
    tell("L0: every tensor in and out")
    rungs["L0"], hashes = coverage_rung(checkpoint, ledger, specification.spec, count, specification.tables)
    if specification.unverified:
        for name in ("L1", "L2"):
            rungs[name] = not_compared(f"no reference: {specification.unverified}", THRESHOLDS[name])
        blocks = {"proven": 0, "lifted": 0, "unverified": len(specification.spec.blocks())}
        return Alignment(rungs=rungs, blocks=blocks, hashes=hashes)
    tell("L1: every block against its module")
    rungs["L1"], float32 = _blocks_rung(specification, custom)
    tell("L2: the generated model against the reference")
    rung = model_rung(lambda folder: load_shrunk(specification, folder, custom), specification.shrunk_config, tell)
    rungs["L2"] = _with_real_weights(rung, checkpoint, specification, tell, custom)
    proofs = [block.proof for block in specification.shrunk.blocks() if block.proof is not None]
    lifted = len({proof.module for proof in proofs if proof.status == "lifted"})
    blocks = {"proven": len(specification.tried) - lifted, "lifted": lifted, "unverified": 0}
    return Alignment(rungs=rungs, blocks=blocks, float32=float32, hashes=hashes)


def _blocks_rung(specification: Specification, custom: Path | None) -> tuple[Rung, list[Float32]]:
    """L1: what the search proved, and the generated blocks once more; and what a run in bfloat16 computes in float32.
    A warning where a person has accepted a config field that only its present value is proven for, where the reference
    contradicts itself, and where what is written by hand computes by other operations."""
    rung = judge({tried.module: tried.error for tried in specification.tried}, THRESHOLDS["L1"])
    with tempfile.TemporaryDirectory() as folder:
        shrunk = load_shrunk(specification, Path(folder), custom)
        again = blocks_rung(shrunk, specification.shrunk_config)
        float32 = float32_steps(shrunk, specification.shrunk_config)
    if rung.verdict == "PASS":
        rung = again.model_copy(update={"details": rung.details + again.details})
    open_fields = sorted({item.field for item in specification.interventions if item.effect == "unexplained"})
    said = [f"{module}: {wrong}" for module, wrong in specification.contradictions.items()]
    said += [f"proven at the present {', '.join(open_fields)} only"] if open_fields else []
    if rung.verdict == "WARN":
        said.append(rung.where)
    if rung.verdict not in {"PASS", "WARN"} or not said:
        return rung, float32
    return rung.model_copy(update={"verdict": "WARN", "where": "; ".join(said)}), float32


def _with_real_weights(
    rung: Rung,
    checkpoint: Checkpoint,
    specification: Specification,
    tell: Callable[[str], None],
    custom: Path | None,
) -> Rung:
    """The rung, joined by the logits on the real weights where both models fit into memory."""
    if quantised_groups(checkpoint.headers):
        skipped = "real weights: not compared, the reference would need its own quantised kernels"
        return rung.model_copy(update={"details": [*rung.details, skipped]})
    tell("L2: the real weights, float32")
    spec = specification.spec
    with tempfile.TemporaryDirectory() as folder:
        try:
            error = real_weights_error(_load(spec, Path(folder), custom), checkpoint)
        except CannotLoad as refused:
            skipped = f"real weights: not compared, the reference does not load them: {refused}"
            return rung.model_copy(update={"details": [*rung.details, skipped]})
    if error is None:
        return rung.model_copy(update={"details": [*rung.details, "real weights: not compared, too large for memory"]})
    real = judge({"real weights, float32: logits": error}, THRESHOLDS["L2 float32"])
    details = [*rung.details, *real.details]
    return (rung if real.verdict == "PASS" else real).model_copy(update={"details": details})


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


def read_lock(folder: Path) -> dict[str, Any]:
    """The lock of a package. Raises InputError if there is none."""
    file = folder / "onboard.lock"
    if not file.is_file():
        raise InputError(str(folder), found="no onboard.lock", expected="a package that onboard wrote")
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise InputError(str(file), found=str(error), expected="JSON") from None
