"""The layouts that a plan chooses among: meshes, what is recomputed, chunks of the loss, and ranks that share a batch.

Ranks that share a batch do less of it each, so they are tried only where nothing fits without them, and then as few as
will do. What a block cannot do is found out before: tp that does not divide its heads, cp that it has no form for.
"""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from dayzero.runtime.communication import communication
from dayzero.runtime.context_parallel import check_context_parallel
from dayzero.runtime.errors import InputError
from dayzero.runtime.memory import batch_memory, state_memory
from dayzero.runtime.mesh import divisors
from dayzero.runtime.parallel import Prefetch
from dayzero.runtime.planned_model import GIB, Mesh, Model, cut_by
from dayzero.runtime.tensor_parallel import check_alone

ACROSS = 8  # a byte from another node costs as much as this many from the own one
RESERVED = 3 * GIB // 2  # device context, communication library
FRAGMENTATION = 0.1  # of all other lines: the allocator's losses, workspaces of kernels
LOSS_CHUNKS = (None, 2048, 512)
SMALL_CHUNK = 2048  # where the device's memory is not known
PREFETCHES: tuple[Prefetch, ...] = (1, 0)
MOST_TOGETHER = 64  # ranks that share a batch


@dataclass(frozen=True)
class Candidate:
    """prefetch: see `parallel.prefetch_units`."""

    mesh: Mesh
    prefetch: Prefetch
    recompute: bool
    loss_chunk: int | None
    lines: dict[str, int]
    received: dict[str, int]
    weighted: int

    @property
    def total(self) -> int:
        return sum(self.lines.values())

    def fits(self, hbm: int | None) -> bool:
        return hbm is None or self.total <= hbm

    @property
    def cost(self) -> tuple:
        """Fewest bytes first; then no recompute, then the larger chunk of the loss, then the smaller mesh sizes."""
        chunk = -(self.loss_chunk or 1 << 62)
        return self.weighted, self.recompute, chunk, self.mesh.dp_replicate, self.mesh.ep, self.mesh.tp


@dataclass(frozen=True)
class Question:
    """What layouts are asked for. hbm: bytes of a device, None if not known; then the choices that need least of it are
    made beforehand, and nothing is replicated. tp, cp: fixed, or None for as few as will do. prefetch: fixed, or None
    for as much as there is room for."""

    model: Model
    devices: int
    tokens: int
    per_node: int
    hbm: int | None
    tp: int | None = None
    cp: int | None = None
    prefetch: Prefetch | None = None
    cut: dict[int, Model] = field(default_factory=dict)  # by tp, as far as they were needed
    refused: list[str] = field(default_factory=list)

    def with_tp(self, tp: int) -> Model:
        """Raises InputError if the model cannot be cut so."""
        if tp not in self.cut:
            self.cut[tp] = cut_by(self.model, tp)
        return self.cut[tp]


def search(question: Question) -> list[Candidate]:
    """All that were looked at. Ranks that share a batch are 1, then as many more as it takes until something fits,
    each time with the next layer gathered early and then without.

    Raises InputError for a fixed tp or cp that does not divide the devices or that the model has no form for. What it
    has no form for otherwise is noted in `question.refused`.
    """
    tp, cp = question.tp or 1, question.cp or 1
    if question.devices % (tp * cp):
        raise InputError(
            "parallel.tp",
            found=f"{tp}, with cp {cp}",
            expected=f"a product that divides the {question.devices} devices",
        )
    check_shared(question, tp, cp)
    if question.hbm is None:
        return list(_candidates(question, tp, cp, question.prefetch or 1))
    seen: list[Candidate] = []
    for together in [tp * cp] if question.tp and question.cp else divisors(question.devices):
        if together % (tp * cp) or together > max(MOST_TOGETHER, tp * cp):
            continue
        pairs = list(_shared(question, together))
        for prefetch in PREFETCHES if question.prefetch is None else (question.prefetch,):
            for pair in pairs:
                seen += _candidates(question, *pair, prefetch)
            if any(candidate.fits(question.hbm) for candidate in seen):
                return seen
    return seen


def with_experts_ahead(question: Question, best: Candidate) -> Candidate:
    """The same with experts gathered early in the backward pass as well, if there is room for them."""
    has_experts = any(kind.experts for kind in question.model.kinds)
    if not has_experts or question.hbm is None or question.prefetch is not None or best.prefetch != 1:
        return best
    lines = dict(best.lines)
    del lines["headroom"]
    lines |= state_memory(question.with_tp(best.mesh.tp), best.mesh, 2)
    more = replace(best, prefetch=2, lines=_with_headroom(lines))
    return more if more.fits(question.hbm) else best


def _shared(question: Question, together: int) -> Iterator[tuple[int, int]]:
    """(tp, cp) of so many ranks that the model has a form for. The ranks of tp share a node, unless that is fixed."""
    for tp in divisors(together):
        cp = together // tp
        if (
            question.tp not in (None, tp)
            or question.cp not in (None, cp)
            or (not question.tp and tp > question.per_node)
        ):
            continue
        try:
            check_shared(question, tp, cp)
        except InputError as error:
            reason = f"{error.where.removeprefix('parallel.')} has to be {error.expected}"
            if reason not in question.refused:
                question.refused.append(reason)
        else:
            yield tp, cp


def check_shared(question: Question, tp: int, cp: int) -> None:
    """Raises InputError for a model that has no form for so many ranks that share a batch."""
    check_alone(question.model.built, tp, cp)
    if cp > 1:
        check_context_parallel(question.model.built, cp)
    question.with_tp(tp)


def _candidates(question: Question, tp: int, cp: int, prefetch: Prefetch) -> Iterator[Candidate]:
    known, devices, tokens, per_node = question.hbm is not None, question.devices, question.tokens, question.per_node
    model, batches = question.with_tp(tp), devices // (tp * cp)
    # Where ranks have to share a batch there is no room for replicas.
    replicas = divisors(batches) if known and tp * cp == (question.tp or 1) * (question.cp or 1) else [1]
    counts = {moe.experts.experts for kind in model.kinds for moe in kind.moes}
    choices = list(itertools.product((False, True), LOSS_CHUNKS)) if known else [(True, SMALL_CHUNK)]
    for ep in divisors(devices):
        if ep > 1 and (not counts or any(count % ep for count in counts)):
            continue
        batch = {choice: batch_memory(model, ep, tokens, *choice, tp, cp) for choice in choices}
        for replicate in replicas:
            sizes = {"dp_replicate": replicate, "dp_shard": batches // replicate, "ep": ep, "efsdp": devices // ep}
            mesh = Mesh(**sizes, tp=tp, cp=cp)
            state = state_memory(model, mesh, prefetch)
            for recompute, group in itertools.groupby(choices, key=lambda choice: choice[0]):
                moved = communication(model, mesh, tokens, recompute, per_node)
                received = {kind: sum(parts.values()) for kind, parts in moved.items()}
                weighted = sum(parts["inside"] + ACROSS * parts["across"] for parts in moved.values())
                for choice in group:
                    lines = _with_headroom(state | batch[choice])
                    yield Candidate(mesh, prefetch, *choice, lines, received, weighted)


def _with_headroom(lines: dict[str, int]) -> dict[str, int]:
    return lines | {"headroom": RESERVED + int(FRAGMENTATION * sum(lines.values()))}
