"""Candidates for a router, read from the order of the operators that it executes and their scalars."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal, size
from dayzero.onboard.candidates.nesting import Inner
from dayzero.onboard.oracle.reference import state_of
from dayzero.onboard.prove.trace import Operations, Step
from dayzero.runtime.weights import Flatten, Source, Stored

_SCORES = {"_softmax": "softmax", "sigmoid": "sigmoid", "softplus": "sqrtsoftplus"}


@dataclass(frozen=True)
class Program:
    """A router's operators from its logits on. classes: their number. place: of the last top-k among them."""

    steps: tuple[Step, ...]
    classes: int
    place: int

    @property
    def before(self) -> tuple[Step, ...]:
        return self.steps[: self.place]

    @property
    def after(self) -> tuple[Step, ...]:
        return self.steps[self.place + 1 :]

    @property
    def top_k(self) -> int:
        return int(self.steps[self.place].numbers[0])


def read_program(operations: Operations, classes: int) -> Program | None:
    """The router's part of a trace, None where nothing selects the best of `classes` scores."""
    places = [
        place
        for place, step in enumerate(operations.sequence)
        if step.name == "topk" and step.shape[-1:] == (classes,) and step.numbers
    ]
    if not places:
        return None
    return Program(tuple(operations.sequence), classes, places[-1])


def propose_router(inner: Inner, matrix: str, vectors: dict[str, int], hidden: int) -> Iterator[Candidate]:
    """Candidates for "Router". inner: what executes the routing. matrix: its weight [classes, hidden]. vectors: names
    of vectors that may belong to it, and their lengths."""
    site = inner.outer
    classes = state_of(site.module)[matrix].shape[0]
    program = read_program(inner.operations, classes)
    if program is None:
        return
    arguments: dict[str, Evidence | Candidate] = {
        "hidden": size(matrix, 1),
        "experts": size(matrix, 0),
        "top_k": _top_k(inner, program),
        **_logits(inner, program),
    }
    if (limit := _limit(inner, program)) is not None:
        arguments["limit"] = limit
    if (normalise := normalise_argument(inner, program.after, program.top_k)) is not None:
        arguments["normalise"] = normalise
    if (scale := scale_argument(inner, program.after, program.top_k)) is not None:
        arguments["scale"] = scale
    for (score, scored), roles, norm in itertools.product(
        _scores(program), _roles(site, vectors, classes), _input_norms(inner, vectors, hidden)
    ):
        used = set(roles.values())
        if norm and any(source.names({}) and next(source.names({})) in used for source in norm.parameters.values()):
            continue
        extra: dict[str, Evidence | Candidate] = {role: literal(True, name) for role, name in roles.items()}
        if norm:
            extra |= {"norm": norm, **_input_scale(inner, program)}
        parameters: dict[str, Source] = {"weight": Stored(matrix)}
        parameters |= {role: _vector(site, name) for role, name in roles.items()}
        yield Candidate("Router", {**arguments, "score": score, "scored": scored, **extra}, parameters)


def _vector(site: Site, name: str) -> Source:
    """[E] of a tensor that may have a dimension of one before it."""
    return Flatten(0, Stored(name)) if state_of(site.module)[name].ndim == 2 else Stored(name)


def _top_k(inner: Inner, program: Program) -> Evidence:
    return _driver(inner, program, program.top_k, (program.top_k + 1, program.top_k - 1), lambda p: p.top_k) or literal(
        program.top_k, "the top-k of the trace"
    )


def _driver(
    inner: Inner, program: Program, value: int, others: tuple[int, ...], read: Callable[[Program], float | None]
) -> Evidence | None:
    """The setting that holds `value` and makes `read` say another number when it holds that."""

    def shows(seen: Operations, other: int) -> bool:
        found = read_program(seen, program.classes)
        return found is not None and read(found) == other

    for other in others:
        if found := inner.driver(value, other, lambda seen, other=other: shows(seen, other)):
            return found
    return None


def _logits(inner: Inner, program: Program) -> dict[str, Evidence | Candidate]:
    """What happens between the product and the score: a factor, a soft cap."""
    found: dict[str, Evidence | Candidate] = {}
    steps = [step for step in program.before if step.shape[-1:] == (program.classes,)]
    for first, second in itertools.pairwise(steps):
        if first.name == "div" and second.name == "tanh" and first.numbers:
            found["logit_softcap"] = inner.cause(first.numbers[-1])
    scores = [place for place, step in enumerate(steps) if step.name in _SCORES]
    for step in steps[: scores[0]] if scores and "logit_softcap" not in found else []:
        if step.name in {"mul", "div"} and step.numbers:
            number = step.numbers[-1]
            found["logit_scale"] = inner.cause(number) if step.name == "mul" else _inverse(inner.cause(number))
    return found


def _inverse(evidence: Evidence) -> Evidence:
    return Evidence(f"1 / {evidence.label}", lambda module, config: 1.0 / evidence.resolve(module, config))


def scored(steps: Sequence[Step], widths: set[int]) -> list[str]:
    """Scores that are taken of tensors so wide, in order."""
    found = [
        _SCORES[step.name] for step in steps if step.name in _SCORES and step.shape[-1:] and step.shape[-1] in widths
    ]
    return list(dict.fromkeys(found))


def _scores(program: Program) -> list[tuple[Evidence, Evidence]]:
    """(score, of which logits), the order of the trace first."""
    found = []
    for place, step in enumerate(program.steps):
        if step.name in _SCORES and step.shape[-1] in {program.classes, program.top_k}:
            scored = "all" if place < program.place else "selected"
            found.append((literal(_SCORES[step.name], "the trace"), literal(scored, "the trace's order")))
    return list({(a.label, b.label): (a, b) for a, b in found}.values())


def _roles(site: Site, vectors: dict[str, int], classes: int) -> Iterator[dict[str, str]]:
    """Assignments of the vectors of one element a class: a bias of the selection, of the logits, or a scale."""
    trained = {name for name, parameter in site.module.named_parameters() if parameter.requires_grad}
    fitting = [name for name, length in vectors.items() if length == classes]
    options = []
    for name in fitting:
        of_linear = name.endswith(".bias") or name == "bias"
        roles = ["logit_bias", "expert_scale", "selection_bias"] if of_linear else ["selection_bias", "expert_scale"]
        options.append(roles + ([] if of_linear else ["logit_bias"]) if name in trained else ["selection_bias"])
    for roles in itertools.product(*options):
        if len(set(roles)) == len(roles):
            yield dict(zip(roles, fitting, strict=True))


def _limit(inner: Inner, program: Program) -> Candidate | None:
    """Groups: a top-k over as many groups before the last one, and scores masked by it."""
    chosen = _groups_of(program)
    masked = [step for step in program.before if step.name in {"masked_fill", "where"}]
    if chosen is None or not masked:
        return None
    groups, kept = chosen
    best_two = any(step.name == "topk" and step.numbers[:1] == (2.0,) for step in program.before if len(step.shape) > 2)
    divisors = tuple(n for n in range(1, program.classes) if program.classes % n == 0 and n not in {groups, kept})
    fewer = tuple(n for n in range(1, groups) if n != kept) or (kept + 1,)
    label = "the trace's top-k over groups"

    def read(place: int) -> Callable[[Program], float | None]:
        return lambda found: (chosen := _groups_of(found)) and chosen[place]

    # Of settings with one value, a changed number of groups must leave as many kept, and the other way round.
    return Candidate(
        "GroupLimit",
        {
            "groups": _driver(inner, program, groups, divisors[::-1], read(0)) or literal(groups, label),
            "kept": _driver(inner, program, kept, fewer, read(1)) or literal(kept, label),
            "by": literal("top2" if best_two else "max", "the trace's scores of groups"),
            "zero_fill": literal(masked[-1].numbers[-1:] == (0.0,), "the value that the trace masks with"),
        },
        {},
    )


def _groups_of(program: Program) -> tuple[int, int] | None:
    """(groups, kept) of the last top-k before the selection that is over whole groups."""
    found = [step for step in program.before if step.name == "topk" and len(step.shape) == 2 and step.numbers]
    return (found[-1].shape[-1], int(found[-1].numbers[0])) if found else None


def normalise_argument(inner: Inner, after: tuple[Step, ...], top_k: int) -> Candidate | None:
    """The quotient after the selection, as the trace spells it; or as it does when a switch of the router is flipped.

    after: the operators after the selection, of weights [T, top_k]."""
    if (arguments := _quotient(inner, after, top_k)) is not None:
        off = [evidence for evidence, seen in inner.switches if _quotient_place(tuple(seen.sequence), top_k) is None]
        return Candidate("Normalise", arguments, {}, off[0] if off else None)
    for evidence, seen in inner.switches:
        if (arguments := _quotient(inner, tuple(seen.sequence), top_k)) is not None:
            return Candidate("Normalise", arguments, {}, evidence)
    return None


def _quotient_place(steps: tuple[Step, ...], top_k: int) -> int | None:
    places = [
        place
        for place, step in enumerate(steps)
        if step.name == "div" and not step.numbers and step.shape[-1:] == (top_k,)
    ]
    return places[0] if places else None


def _quotient(inner: Inner, after: tuple[Step, ...], top_k: int) -> dict[str, Evidence | Candidate] | None:
    place = _quotient_place(after, top_k)
    if place is None:
        return None
    before = [step for step in after[:place] if step.name in _TOTALS]
    last = before[-1] if before else None
    if last is None or not last.numbers:
        return {}
    if last.name == "add":
        return {"eps": inner.cause(last.numbers[-1])} if last.numbers[-1] else {}
    if last.name in {"clamp", "clamp_min"}:
        return {"minimum": inner.cause(last.numbers[0])}
    if last.name in {"linalg_vector_norm", "norm"}:
        order = last.numbers[0]
        other = (order + 1.0,)
        named = inner.driver(order, other[0], lambda seen: any(step.numbers[:1] == other for step in seen.sequence))
        return {"order": named or literal(order, "the norm of the trace")}
    return {}


_TOTALS = {"sum", "add", "clamp", "clamp_min", "linalg_vector_norm", "norm"}


def scale_argument(inner: Inner, after: tuple[Step, ...], top_k: int) -> Evidence | None:
    """A factor on the weights [T, top_k], seen even where it is 1."""
    for step in after:
        if step.name == "mul" and step.numbers and step.shape[-1:] == (top_k,):
            value = step.numbers[-1]
            found = inner.cause(value)
            return found if value != 1.0 or found.label.startswith("attribute") else None
    return None


def _input_norms(inner: Inner, vectors: dict[str, int], hidden: int) -> Iterator[Candidate | None]:
    """None, or an RMS norm on the router's input, whose weight is a vector as long as the input."""
    if "rsqrt" not in inner.operations.steps:
        yield None
        return
    eps = [step.numbers[-1] for step in inner.operations.sequence if step.name == "add" and step.numbers]
    fitting: list[str | None] = [name for name, length in vectors.items() if length == hidden]
    for name, value in itertools.product([*fitting, None], [value for value in dict.fromkeys(eps) if value < 1e-2]):
        arguments: dict[str, Evidence | Candidate] = {
            "width": literal(hidden, "the stream") if name is None else size(name, 0),
            "eps": inner.cause(value),
            "scaled": literal(name is not None, "the router's vectors"),
        }
        yield Candidate("RMSNorm", arguments, {} if name is None else {"weight": Stored(name)})


def _input_scale(inner: Inner, program: Program) -> dict[str, Evidence | Candidate]:
    """A factor on the router's input."""
    factors = [
        step.numbers[-1]
        for step in program.before
        if step.name == "mul" and step.numbers and step.shape[-1:] != (program.classes,)
    ]
    return {"input_scale": inner.cause(factors[-1])} if factors else {}


def dense(index: Tensor, weights: Tensor, classes: int) -> Tensor:
    """[T, classes]: each token's weight for every class."""
    index = index.reshape(-1, index.shape[-1])
    return torch.zeros(index.shape[0], classes, dtype=torch.float64).scatter_add(
        1, index, weights.reshape(index.shape).to(torch.float64)
    )
