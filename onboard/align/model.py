"""L2: the generated model against the reference: logits, loss and every parameter gradient.

What is compared is code as it was generated: model.py and weights.py of the shrunk specification, written by the same
templates as the real ones, loaded and run. The reference's weights reach it through the rules, from the tensors that
transformers writes to disk. Documents of unequal length are packed for ours and run one by one in the reference.
"""

import contextlib
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dayzero.onboard.align.divergence import first_divergence
from dayzero.onboard.align.ladder import THRESHOLDS, Rung, judge
from dayzero.onboard.align.loading import NotLoaded, load
from dayzero.onboard.checkpoint import Checkpoint
from dayzero.onboard.oracle import remote_code
from dayzero.onboard.oracle.gradients import gradients
from dayzero.onboard.oracle.reference import (
    Promote,
    build,
    load_config,
    logits_of,
    model_class,
    on_disk,
    quiet,
    redraw,
)
from dayzero.onboard.oracle.router_choices import group_choices, router_choices
from dayzero.onboard.oracle.top_k import ForceTopK, steady_choices
from dayzero.onboard.prove.block import relative_error
from dayzero.onboard.shrink.shrink import SEQUENCE
from dayzero.runtime.package import Package
from dayzero.runtime.safetensors_reader import SafetensorsReader, TensorsReader
from dayzero.runtime.weights import bind

LENGTHS = (SEQUENCE, 17, 1, 9)  # of the packed documents; one has a single token
# In float32 ours may be this many times as far from the reference as that is from its own float64: roundings of one
# formula differ by as much from draw to draw, a wrong dtype by far more.
ROUNDING = 10.0
ROUNDED_AWAY = 1e-2  # a reference that is further than this from its own float64 excuses nothing
REAL_LENGTHS = (48, 31)
REAL_BYTES = 6 * 2**30  # both models in float32 must fit in this for the comparison on the real weights


def model_rung(
    package: Callable[[Path], Package],
    config: Mapping[str, Any],
    tell: Callable[[str], None] = lambda line: None,
) -> Rung:
    """package(folder): renders the shrunk package into `folder` and loads it. config: the shrunk config."""
    errors: dict[str, dict[str, float]] = {}
    rounded: list[str] = []
    with tempfile.TemporaryDirectory() as folder:
        generated = package(Path(folder))
        rung = "L2"
        try:
            tell("comparing the whole model in torch.float64")
            errors["L2"], exact, _ = _compare(generated, config, torch.float64)
            tell("comparing the whole model in torch.float32")
            rung = "L2 float32"
            found, theirs, floors = _compare(generated, config, torch.float32)
            errors[rung], rounded = beyond_rounding(found, theirs, exact, floors)
        except NotLoaded as error:
            return judge({str(error): math.inf}, THRESHOLDS["L2"])
        except (RuntimeError, ValueError, IndexError, TypeError) as error:
            said = " ".join(str(error).split())[:200]
            errors[rung] = {f"the two models do not run side by side: {said}": math.inf}
        rungs = [judge(found, THRESHOLDS[rung]) for rung, found in errors.items()]
        failed = [rung for rung in rungs if rung.verdict != "PASS"]
        first = first_divergence(generated, config) if failed else ""
    worst = failed[0] if failed else rungs[0]
    where = f"{worst.where}; first to differ: {first}" if first else worst.where
    details = [line for rung in rungs for line in rung.details] + rounded
    return worst.model_copy(update={"details": details, "where": where})


def beyond_rounding(
    errors: dict[str, float], rounded: dict[str, Tensor], exact: dict[str, Tensor], floors: Mapping[str, float]
) -> tuple[dict[str, float], list[str]]:
    """The float32 errors to judge, and a line for each that is not, since the reference in float32 (`rounded`) is about
    as far from itself in float64 (`exact`): some recurrences lose four of the seven digits that float32 has. floors: as
    of `relative_error`."""
    judged, lines = {}, []
    for name, error in errors.items():
        own = relative_error(rounded[name].double(), exact[name.replace("float32", "float64")], floors.get(name, 0.0))
        if own <= ROUNDED_AWAY and THRESHOLDS["L2 float32"] < error <= ROUNDING * own:
            lines.append(f"{name}: {error:.2e}, not judged: the reference's own rounding is {own:.2e}")
        else:
            judged[name] = error
    return judged, lines


def _compare(
    generated: Package, config: Mapping[str, Any], dtype: torch.dtype
) -> tuple[dict[str, float], dict[str, Tensor], dict[str, float]]:
    """(relative errors by what they belong to, what the reference gave for the same, the size below which that counts
    as this large). The weights are float32 numbers whatever the dtype, so that both dtypes compute the same."""
    reference, _ = build(config)
    generator = torch.Generator().manual_seed(7)
    redraw(reference, generator)
    with torch.no_grad():
        for parameter in reference.parameters():
            parameter.copy_(parameter.float())
    stored = on_disk(reference)
    rules = bind(generated.rules)
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    ours, reference = load(generated, stored).to(dtype), reference.to(dtype)
    documents = [_document(n, generated.spec.tokens, generator) for n in LENGTHS]
    tokens = sum(LENGTHS)
    like, chosen, among = _routing(ours, reference, documents[:2], dtype)
    choices = _choose(tokens, chosen, group_choices(ours), generator)
    errors: dict[str, float] = {}
    wanted: dict[str, Tensor] = {}
    floors: dict[str, float] = {}
    for routing in ("natural", "forced") if choices else ("natural",):
        forced = choices if routing == "forced" else None
        theirs = _reference_pass(reference, documents, forced, like, among, dtype)
        mine = _our_pass(ours, documents, forced, like, among)
        label = f"{str(dtype).removeprefix('torch.')}, {routing} routing"
        stored_grads = on_disk(reference, theirs["gradients"])
        floor = 1e-6 * max(float(torch.linalg.vector_norm(grad)) for grad in stored_grads.values())
        for what in ("logits", "loss"):
            errors[f"{label}: {what}"] = relative_error(mine[what], theirs[what])
            wanted[f"{label}: {what}"] = theirs[what]
        for name, gradient in mine["gradients"].items():
            grad = rules[name].read(TensorsReader(stored_grads), shapes).to(dtype)
            errors[f"{label}: gradient of {name}"] = relative_error(gradient, grad, floor)
            wanted[f"{label}: gradient of {name}"] = grad
            floors[f"{label}: gradient of {name}"] = floor
    return errors, wanted, floors


def _document(length: int, vocabulary: int, generator: torch.Generator) -> Tensor:
    """Random ids, none twice as long as there are others: of equal tokens, it is up to rounding which one a layer takes
    that attends to the best of them."""
    ids = 3 + torch.randperm(vocabulary - 3, generator=generator)
    return ids[torch.arange(length) % len(ids)]


def _routing(
    ours: nn.Module, reference: nn.Module, documents: list[Tensor], dtype: torch.dtype
) -> tuple[set[tuple[int, int]], list[tuple[int, int]], set[nn.Module | None]]:
    """(classes, top_k) of our routers and (groups, kept) of their limits; both in the order of one pass, none where the
    reference does not choose in the same order, as where a table of the token ids decides; and the modules of both
    models that choose so. documents: two, of different lengths."""
    like = router_choices(ours) | group_choices(ours)
    with torch.no_grad():
        mine = steady_choices([partial(ours, ids, torch.tensor([0, len(ids)])) for ids in documents], like)
    with torch.no_grad(), _promoting(dtype):
        theirs = steady_choices([partial(logits_of, reference, ids[None]) for ids in documents], like)
    return like, theirs.seen if theirs.seen == mine.seen else [], {*mine.by, *theirs.by}


def _choose(
    tokens: int, chosen: list[tuple[int, int]], limits: Collection[tuple[int, int]], generator: torch.Generator
) -> list[Tensor]:
    """Distinct random classes for each token, [tokens, top_k], for every choice in turn. After a choice of groups the
    experts are of these groups; without one the last expert is never chosen, so that one is empty."""
    choices: list[Tensor] = []
    groups: tuple[int, Tensor] | None = None
    for classes, top_k in chosen:
        scores = torch.rand(tokens, classes, generator=generator)
        if (classes, top_k) in limits:
            choices.append(scores.topk(top_k, dim=-1).indices)
            groups = classes, choices[-1]
            continue
        if groups is not None:
            count, kept = groups
            inside = torch.zeros(tokens, count, dtype=torch.bool).scatter(-1, kept, True)
            scores = scores.masked_fill(~inside.repeat_interleave(classes // count, -1), -1.0)
        elif classes > top_k:
            scores[:, -1] = -1.0
        choices.append(scores.topk(top_k, dim=-1).indices)
        groups = None
    return choices


def _loss(logits: Tensor, documents: list[Tensor]) -> Tensor:
    """Mean cross entropy of the next token over all documents. logits: [T, V], documents end to end."""
    labels = torch.cat([torch.cat((document[1:], torch.tensor([-100]))) for document in documents])
    return F.cross_entropy(logits, labels, ignore_index=-100)


def _reference_pass(
    model: nn.Module,
    documents: list[Tensor],
    forced: list[Tensor] | None,
    like: Collection[tuple[int, int]],
    among: Collection[nn.Module | None],
    dtype: torch.dtype,
) -> dict[str, Any]:
    parts: list[Tensor] = []

    def loss() -> Tensor:
        parts.clear()
        start = 0
        for document in documents:
            mine = [choice[start : start + len(document)] for choice in forced or []]
            force = ForceTopK(mine, like, among) if forced is not None else None
            with _promoting(dtype), force or contextlib.nullcontext():
                parts.append(logits_of(model, document[None])[0])
            if force is not None and force.calls != len(mine):
                raise RuntimeError(f"the reference selected {force.calls} times, ours does {len(mine)} times")
            start += len(document)
        return _loss(torch.cat(parts), documents)

    names = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    value, grads = gradients(loss, list(names.values()))
    return {"logits": torch.cat(parts).detach(), "loss": value, "gradients": dict(zip(names, grads, strict=True))}


def _promoting(dtype: torch.dtype) -> contextlib.AbstractContextManager:
    """What the reference needs around it to compute in `dtype` throughout."""
    return Promote() if dtype == torch.float64 else contextlib.nullcontext()


def _our_pass(
    model: nn.Module,
    documents: list[Tensor],
    forced: list[Tensor] | None,
    like: Collection[tuple[int, int]],
    among: Collection[nn.Module | None],
) -> dict[str, Any]:
    bounds = torch.tensor([0, *torch.tensor([len(d) for d in documents]).cumsum(0).tolist()])
    force = ForceTopK(forced, like, among) if forced is not None else contextlib.nullcontext()
    with sdpa_kernel(SDPBackend.MATH), force:
        logits = model(torch.cat(documents), bounds)
    loss = _loss(logits, documents)
    names = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    grads = torch.autograd.grad(loss, list(names.values()), allow_unused=True, materialize_grads=True)
    return {"logits": logits.detach(), "loss": loss.detach(), "gradients": dict(zip(names, grads, strict=True))}


@contextlib.contextmanager
def all_cores() -> Iterator[None]:
    """As many threads as there are cores, for products that are large."""
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CannotLoad(Exception):
    """The reference does not load the checkpoint itself: its own code has other shapes than the files."""


@all_cores()
def real_weights_error(package: Package, checkpoint: Checkpoint) -> float | None:
    """Relative error of the logits on the real weights, float32, natural routing; None for a checkpoint too large to
    hold twice. Raises CannotLoad."""
    parameters = sum(math.prod(header.shape) for header in checkpoint.headers.values())
    if 8 * parameters > REAL_BYTES:
        return None
    generator = torch.Generator().manual_seed(11)
    vocabulary = package.spec.tokens
    documents = [torch.randint(0, vocabulary, (n,), generator=generator) for n in REAL_LENGTHS]
    config = load_config(checkpoint.config)
    with quiet(), torch.no_grad():
        cls = model_class(config, list(checkpoint.config.get("architectures") or []))
        computed = _computed_buffers(cls, config) if remote_code.current() is not None else {}
        try:
            reference = cls.from_pretrained(  # type: ignore[attr-defined]
                checkpoint.path,
                config=config,
                dtype=torch.float32,
                attn_implementation="eager",
                trust_remote_code=False,
            )
        except (RuntimeError, ValueError) as error:
            raise CannotLoad(" ".join(str(error).split())[:200]) from None
        for name, value in computed.items():
            reference.get_buffer(name).copy_(value)
        theirs = torch.cat([logits_of(reference, document[None])[0] for document in documents])
        del reference
    shapes = {name: header.shape for name, header in checkpoint.headers.items()}
    reader = SafetensorsReader(checkpoint.path, {name: header.file for name, header in checkpoint.headers.items()})
    with torch.device("meta"):
        ours = package.build()
    ours.to_empty(device="cpu")
    parameters_by_name = ours.state_dict(keep_vars=True)
    with torch.no_grad():
        for name, rule in bind(package.rules).items():
            parameters_by_name[name].copy_(rule.read(reader, shapes))
        bounds = torch.tensor([0, *torch.tensor(REAL_LENGTHS).cumsum(0).tolist()])
        logits = ours(torch.cat(documents), bounds)
    return relative_error(logits, theirs)


def _computed_buffers(cls: type, config: Any) -> dict[str, Tensor]:
    """What the constructor of the checkpoint's own code computes and no file holds, such as rotary frequencies. When it
    loads a checkpoint, transformers knows by their names which ones to compute again; others keep what memory held."""
    made: nn.Module = cls(config)
    saved = made.state_dict().keys()
    return {name: buffer.clone() for name, buffer in made.named_buffers() if name not in saved}
