"""How a model is trained on given devices: the mesh, what is recomputed, and the memory that it takes, line by line."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from rich.console import Console

from dayzero.runtime import config, plan_table
from dayzero.runtime.errors import InputError
from dayzero.runtime.memory import host_memory
from dayzero.runtime.moments import Kept
from dayzero.runtime.nn.expert_parallel import Dispatcher
from dayzero.runtime.parallel import Prefetch
from dayzero.runtime.plan_search import Candidate, Question, search, with_experts_ahead
from dayzero.runtime.planned_model import GIB, Mesh, Mode, measure
from dayzero.runtime.precision import Precision
from dayzero.runtime.spec import ModelSpec

LISTED = 12
PREFETCHED = (
    "parameters are gathered when they are needed",
    "the next layer is gathered while one computes",
    "the next layer is gathered while one computes, and its experts in backward too",
)


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid")


class PlannedUnit(Record):
    """What FSDP gathers at a time. parameters: of one unit, over all ranks. over: the mesh dimension that cuts it."""

    name: str
    count: int
    parameters: int
    over: Literal["dp_shard", "efsdp"]


class Alternative(Record):
    """Another mesh at its best, and why it was not taken. weighted_bytes: see `Plan.weighted_bytes`."""

    mesh: Mesh
    recompute: bool
    loss_chunk: int | None
    total_bytes: int
    weighted_bytes: int
    reason: str


class Plan(Record):
    """The chosen layout. per_rank_bytes: by line, as `memory` defines them, of rank 0; host_bytes: in host memory.
    optimizer, states, offload: as in train.yaml.

    communication_bytes: received in a step by rank 0, by kind. weighted_bytes: their sum, those from other nodes
    counted ACROSS times; the plan minimises it among what fits. advice: what would fit, where nothing does.
    hbm_bytes: None where the device is not known; then nothing is replicated and all is recomputed.
    prefetch: which units are gathered early (`parallel.prefetch_units`).
    tokens_per_device: of a batch, which all ranks of tp and cp share. dispatcher: how tokens get to experts on other
    ranks. refused: why ranks could not share a batch otherwise.
    """

    model: str
    devices: int
    devices_per_node: int
    mode: Mode
    precision: Precision
    tokens_per_device: int
    mesh: Mesh
    prefetch: Prefetch = 1
    recompute: bool
    loss_chunk: int | None
    lora_rank: int | None
    lora_targets: list[str]
    optimizer: str
    states: Kept
    offload: bool
    units: list[PlannedUnit]
    per_rank_bytes: dict[str, int]
    host_bytes: dict[str, int]
    total_bytes: int
    hbm_bytes: int | None
    fits: bool
    communication_bytes: dict[str, int]
    weighted_bytes: int
    alternatives: list[Alternative]
    advice: list[str]
    dispatcher: Dispatcher = Field(default="alltoall", exclude_if=lambda dispatcher: dispatcher == "alltoall")
    refused: list[str] = Field(default=[], exclude_if=lambda refused: not refused)

    def render(self, console: Console) -> None:
        """Prints the layout, the memory of a rank, what a step moves, and the alternatives, in 80 columns."""
        together = self.mesh.tp * self.mesh.cp
        head = [
            f"{self.model}: {self.mode}, {self.precision}, {self.tokens_per_device} tokens a "
            f"{'batch' if together > 1 else 'device'}",
            f"{self.devices} devices, {self.devices_per_node} a node: {self.mesh}",
            "layers are computed again in backward" if self.recompute else "all activations are kept",
            f"the loss takes {self.loss_chunk or 'all'} tokens at a time",
            PREFETCHED[self.prefetch],
        ]
        if together > 1:
            head.insert(2, f"a batch does not fit into one device: {together} share it")
        if self.lora_targets:
            head.append(f"adapters of rank {self.lora_rank} on {', '.join(self.lora_targets)}")
        if self.dispatcher != "alltoall" and self.mesh.ep > 1:
            head.append(f"tokens get to experts on other ranks by {self.dispatcher}")
        where = "in host memory" if self.offload else "on the device"
        head.append(f"optimizer {self.optimizer}, its moments in {self.states}, {where}")
        tables = [
            plan_table.memory(self.per_rank_bytes, self.total_bytes, self.hbm_bytes),
            plan_table.communication(self.communication_bytes),
        ]
        if self.host_bytes:
            tables.insert(1, plan_table.host(self.host_bytes))
        if self.alternatives:
            rows = [(str(other.mesh), other.total_bytes, other.reason) for other in self.alternatives]
            tables.append(plan_table.alternatives(rows))
        plan_table.show(console, head, tables, [*(f"{reason}." for reason in self.refused), *self.advice])


def make_plan(
    spec: ModelSpec,
    *,
    devices: int,
    hbm_gib: float | None = None,
    mode: Mode,
    tokens_per_device: int,
    devices_per_node: int = 8,
    lora_rank: int = 16,
    precision: Precision = "bf16",
    optimizer: config.Optimizer | None = None,
    asynchronous: bool = True,
    train_indexers: bool = False,
    tp: int | None = None,
    cp: int | None = None,
    prefetch: Prefetch | None = None,
    dispatcher: Dispatcher = "alltoall",
) -> Plan:
    """The layout that moves the fewest bytes among those that fit into `hbm_gib` GiB a device.

    Searches ep over the common divisors of devices and experts, dp_replicate over the divisors of devices, recompute
    on and off, and chunks of the loss. Where nothing fits, more and more ranks share a batch of `tokens_per_device`
    tokens, over tp and cp, unless these are given. Units are gathered as early as there is room for, unless `prefetch`
    says how early. If still nothing fits: the layout that needs least, with fits=False
    and advice. asynchronous: checkpoints are written from a copy in host memory. train_indexers: by the loss of their
    own, for which tp is 1.
    Raises InputError for fewer than one device or token, a model without anything to adapt, or tp and cp that do not
    fit it.
    """
    sizes = {"devices": devices, "tokens_per_device": tokens_per_device, "devices_per_node": devices_per_node}
    for name, value in sizes.items():
        if value < 1:
            raise InputError(name, found=str(value), expected="1 or more")
    optimizer = optimizer or config.Optimizer()
    model = measure(spec, mode, precision, lora_rank, optimizer, asynchronous, train_indexers, dispatcher=dispatcher)
    hbm = None if hbm_gib is None else int(hbm_gib * GIB)
    tp = 1 if train_indexers and tp is None else tp
    question = Question(model, devices, tokens_per_device, devices_per_node, hbm, tp, cp, prefetch)
    candidates = search(question)
    fitting = [candidate for candidate in candidates if candidate.fits(hbm)]
    best = min(fitting, key=lambda c: c.cost) if fitting else min(candidates, key=lambda c: c.total)
    best = with_experts_ahead(question, best)
    return Plan(
        model=spec.name,
        devices=devices,
        devices_per_node=devices_per_node,
        mode=mode,
        precision=precision,
        tokens_per_device=tokens_per_device,
        mesh=best.mesh,
        prefetch=best.prefetch,
        recompute=best.recompute,
        loss_chunk=best.loss_chunk,
        lora_rank=lora_rank if mode == "lora" else None,
        lora_targets=list(model.lora_targets),
        optimizer=optimizer.name,
        states=optimizer.states,
        offload=optimizer.offload,
        host_bytes=host_memory(question.with_tp(best.mesh.tp), best.mesh),
        units=[
            PlannedUnit(
                name=unit.name,
                count=count,
                parameters=sum(math.prod(parameter.shape) for parameter in unit.parameters),
                over="efsdp" if unit.experts else "dp_shard",
            )
            for unit, count in model.units
        ],
        per_rank_bytes=best.lines,
        total_bytes=best.total,
        hbm_bytes=hbm,
        fits=bool(fitting),
        communication_bytes=best.received,
        weighted_bytes=best.weighted,
        alternatives=_alternatives(candidates, best, hbm),
        advice=[] if fitting or hbm is None else _advice(question, mode, best, hbm),
        dispatcher=dispatcher,
        refused=question.refused,
    )


def plan_for(
    spec: ModelSpec,
    settings: config.TrainConfig,
    devices: int,
    hbm_gib: float | None,
    tp: int | None = None,
    cp: int | None = None,
) -> Plan:
    """`make_plan` of a run with these settings. tp, cp: in place of theirs."""
    parallel = settings.parallel
    return make_plan(
        spec,
        devices=devices,
        hbm_gib=hbm_gib,
        mode=settings.train.mode,
        tokens_per_device=settings.data.tokens_per_rank,
        lora_rank=settings.lora.rank,
        precision=settings.train.precision,
        optimizer=settings.optimizer,
        asynchronous=settings.checkpoint.asynchronous,
        train_indexers=settings.train.indexer_loss != "none",
        tp=tp or config.fixed(parallel.tp),
        cp=cp or config.fixed(parallel.cp),
        prefetch=None if parallel.prefetch == "auto" else parallel.prefetch,
        dispatcher=settings.experts.dispatcher,
    )


def plan_text(plan: Plan) -> str:
    """As YAML, of which `read_plan` makes the same plan."""
    return yaml.safe_dump(plan.model_dump(mode="json"), sort_keys=False, width=120)


def read_plan(file: Path) -> Plan:
    """Raises InputError for a file that is missing, not YAML, or not a plan; it names the field."""
    try:
        return Plan.model_validate(yaml.safe_load(file.read_text()))
    except (OSError, yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(str(file), found=" ".join(str(error).split()), expected="a plan in YAML") from None
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise InputError(f"{file}: {field}", found=str(first["input"])[:80], expected=first["msg"]) from None


def _alternatives(candidates: list[Candidate], best: Candidate, hbm: int | None) -> list[Alternative]:
    """Every other mesh at its best: what fits by bytes moved, then what does not by what it needs."""
    by_mesh: dict[Mesh, list[Candidate]] = {}
    for candidate in candidates:
        if candidate.mesh != best.mesh:
            by_mesh.setdefault(candidate.mesh, []).append(candidate)
    fitting, failing = [], []
    for group in by_mesh.values():
        if good := [candidate for candidate in group if candidate.fits(hbm)]:
            fitting.append(min(good, key=lambda c: c.cost))
        else:
            failing.append(min(group, key=lambda c: c.total))
    fitting.sort(key=lambda c: c.cost)
    failing.sort(key=lambda c: c.total)
    chosen = [*fitting[: LISTED // 2], *failing[: LISTED - min(len(fitting), LISTED // 2)]]
    return [
        Alternative(
            mesh=candidate.mesh,
            recompute=candidate.recompute,
            loss_chunk=candidate.loss_chunk,
            total_bytes=candidate.total,
            weighted_bytes=candidate.weighted,
            reason=_reason(candidate, best, hbm),
        )
        for candidate in chosen
    ]


def _reason(candidate: Candidate, best: Candidate, hbm: int | None) -> str:
    if hbm is not None and not candidate.fits(hbm):
        return f"needs {candidate.total / GIB:.1f} GiB of {hbm / GIB:.1f}"
    if candidate.weighted > best.weighted:
        return f"moves {candidate.weighted / best.weighted:.2f} times as much" if best.weighted else "moves more"
    if candidate.recompute and not best.recompute:
        return "moves as much, and recomputes"
    return "as good; the smaller mesh sizes were taken"


def _advice(question: Question, mode: Mode, best: Candidate, hbm: int) -> list[str]:
    """What would fit: more devices, fewer tokens, adapters instead of all parameters."""
    devices, tokens = question.devices, question.tokens

    def anything_fits(devices: int, tokens: int) -> bool:
        return any(candidate.fits(hbm) for candidate in search(replace(question, devices=devices, tokens=tokens)))

    advice = [f"The least that was found needs {best.total / GIB:.1f} GiB a device, of {hbm / GIB:.1f}."]
    fewer = next((tokens // 2**i for i in range(1, 7) if tokens >> i and anything_fits(devices, tokens // 2**i)), None)
    if fewer:
        advice.append(f"{fewer} tokens a device would fit on {devices} devices.")
    more = next((devices * 2**i for i in range(1, 7) if anything_fits(devices * 2**i, tokens)), None)
    if more:
        advice.append(f"{more} devices of this size would fit {tokens} tokens each.")
    if not fewer and not more:
        advice.append(
            f"Neither {tokens // 64 or 1} tokens a device nor {devices * 64} devices would do: take larger ones."
        )
    if mode == "full":
        advice.append("Adapters (mode lora) need far less: no gradient and no moment of a frozen weight.")
    return advice
