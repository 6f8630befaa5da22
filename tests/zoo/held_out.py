"""Proven blocks on weights, inputs and configs that took no part in any search.

held = onboarded("mixtral")
misses(held, seed=101)                        # lines, one a block and trial that does not agree
misses_when(held, varied, seed=606)           # the same beside a reference with one config field changed
"""

import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from zoo.conformance import write_checkpoint

from dayzero.onboard import specify
from dayzero.onboard.align.blocks import Place, SideBySide, as_candidate, side_by_side
from dayzero.onboard.align.climb import load_shrunk
from dayzero.onboard.align.ladder import THRESHOLDS
from dayzero.onboard.align.loading import load
from dayzero.onboard.candidates import Site
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.composition import load_reference, specification_of
from dayzero.onboard.oracle.calls import record_calls
from dayzero.onboard.oracle.documents import documents
from dayzero.onboard.oracle.reference import build, never_trained, on_disk, redraw, run, state_of, text_config
from dayzero.onboard.prove.block import TOLERANCE, errors, relative_error
from dayzero.onboard.prove.interventions import varied_fields
from dayzero.onboard.prove.model import prove_model
from dayzero.onboard.prove.proven import NotProven, Proven
from dayzero.onboard.shrink.shrink import SEQUENCE
from dayzero.onboard.specify import Specification
from dayzero.runtime.errors import InputError
from dayzero.runtime.package import Package
from dayzero.runtime.safetensors_reader import TensorsReader
from dayzero.runtime.spec import CheckpointId, ModelSpec
from dayzero.runtime.weights import bind

# What a reference raises for a config that it does not take, or ours for sizes that its evidence does not give.
REFUSALS = (InputError, RuntimeError, TypeError, ValueError, AttributeError, KeyError, IndexError, ZeroDivisionError)
_NEVER_SATURATED = ("input x0.1", "input x1.0")
_WHOLE, _NO_MODEL = "logits", "the same evidence makes no model"


@dataclass
class Onboarded:
    """A family's specification, and what the search knew when it began to vary config fields: small: the shrunk config;
    section: where in it the text decoder's fields are; reads: the fields that matter, or may."""

    found: Specification
    small: Mapping[str, Any]
    section: str
    reads: set[str]
    proven: Proven
    identity: CheckpointId

    @property
    def fields(self) -> Mapping[str, Any]:
        return self.small[self.section] if self.section else self.small

    def varied(self) -> Iterator[tuple[str, Any, Mapping[str, Any]]]:
        """(field, other value, the whole config with it)."""
        for name, _, other, fields in varied_fields(self.fields, self.reads):
            yield name, other, {**self.small, self.section: fields} if self.section else fields


def onboarded(family: str) -> Onboarded:
    """A small checkpoint of the family, specified."""
    held: dict[str, Any] = {}

    def instead(small, section, reads, dormant, proven, ids, identity, tell):
        held.update(small=small, section=section, reads=reads | dormant, proven=proven, identity=identity)
        return []

    with tempfile.TemporaryDirectory() as folder, mock.patch.object(specify, "intervene", instead):
        checkpoint = read_checkpoint(write_checkpoint(family, Path(folder) / family))
        found = specify.specify(checkpoint.config, checkpoint.identity(), family, headers=checkpoint.headers)
    return Onboarded(found, **held)


def trials(site: Site, generator: torch.Generator) -> Iterator[tuple[str, Tensor]]:
    """(name, input) with the module's weights set for it: as drawn, then saturated, then with strange biases."""
    shape = site.call.hidden.shape
    for scale in (0.1, 1.0, 8.0):
        yield f"input x{scale}", scale * torch.randn(shape, generator=generator, dtype=torch.float64)
    redraw(site.module, generator, gain=3.0)
    yield "weights x3, saturated", 4 * torch.randn(shape, generator=generator, dtype=torch.float64)
    redraw(site.module, generator)
    for vector in never_trained(site.module):
        vector.copy_(5 * torch.randn(vector.shape, generator=generator, dtype=torch.float64))
    if never_trained(site.module):
        yield "biases above every score", torch.randn(shape, generator=generator, dtype=torch.float64)


def misses(held: Onboarded, seed: int) -> tuple[list[str], int]:
    """One line for each block and trial that does not agree, gradients included, and how many blocks there were."""
    with tempfile.TemporaryDirectory() as folder:
        pair = side_by_side(load_shrunk(held.found, Path(folder)), held.found.shrunk_config, seed)
    lines, blocks = [], 0
    for place, site in pair.blocks():
        blocks += 1
        lines += [f"{line}, seed {seed}" for line in misses_of(place, site, torch.Generator().manual_seed(seed))]
    return lines, blocks


def misses_of(place: Place, site: Site, generator: torch.Generator) -> list[str]:
    """The same of one block."""
    lines = []
    candidate = as_candidate(place, site)
    block = candidate.build(site.module, site.config)
    saved = {name: tensor.clone() for name, tensor in state_of(site.module).items()}
    for name, hidden in trials(site, generator):
        held = {**dict(block.named_parameters()), **dict(block.named_buffers())}
        with torch.no_grad():
            for ours, value in candidate.values(state_of(site.module)).items():
                held[ours].copy_(value)
        found = errors(site, candidate, block, hidden, generator)
        if not found and name in _NEVER_SATURATED:
            lines.append(f"{place.both}, {name}: the module gives nothing finite to compare with")
        lines += [
            f"{place.both}, {name}: {what} misses by {error:.1e}"
            for what, error in found.items()
            if not error <= TOLERANCE
        ]
    with torch.no_grad():
        for name, tensor in state_of(site.module).items():
            tensor.copy_(saved[name])
    return lines


def misses_when(held: Onboarded, config: Mapping[str, Any], field: str, seed: int) -> tuple[str, list[str]]:
    """(what became of the blocks, lines as of `misses`) beside a fresh reference of this config, in which one field was
    changed: "refused" by the reference, "follows" with the same evidence, "other block" where others are proven."""
    tokens = held.found.shrunk.tokens
    try:
        model, _ = build(config, record=True)
        redraw(model, torch.Generator().manual_seed(seed))
        ids = documents(model, tokens, SEQUENCE, torch.Generator().manual_seed(seed))
        with torch.no_grad():
            logits = run(model, ids)
    except REFUSALS as error:
        return "refused", [] if str(error) else ["refused without a word"]
    try:
        pair = _beside(model, held.proven, held.identity, ids)
        lines = _misses_beside(pair, held, field, logits, seed)
    except (NotProven, *REFUSALS) as error:
        lines = [f"{_NO_MODEL}: {' '.join(str(error).split())[:200]}"]
    if not any(line.startswith((_WHOLE, _NO_MODEL)) for line in lines):
        return "follows", lines  # so do interventions say, which look at no block by itself
    search = torch.Generator().manual_seed(2)
    try:
        again, _ = prove_model(model, documents(model, tokens, SEQUENCE, search), search, usual=held.proven.claims)
        redraw(model, torch.Generator().manual_seed(seed))
        with torch.no_grad():
            logits = run(model, ids)
        found = _misses_beside(_beside(model, again, held.identity, ids), None, field, logits, seed)
    except (NotProven, *REFUSALS) as error:
        return "unexplained", [*lines, f"nothing else is proven: {' '.join(str(error).split())[:200]}"]
    return "other block", found


def _beside(model: torch.nn.Module, proven: Proven, identity: CheckpointId, ids: Tensor) -> SideBySide:
    """The model of what was proven, its arguments resolved on the reference `model`, beside it."""
    spec = specification_of(model, text_config(model), proven, list(range(len(proven.layers))), identity, "altered")
    ours = spec.build().to(torch.float64)
    load_reference(ours, model, proven)
    calls, _ = record_calls(model, ids)
    position = torch.arange(SEQUENCE).repeat(len(ids))
    with torch.no_grad():
        tables = tuple(rotary(position, torch.float64) for rotary in ours.rotaries)
    return SideBySide(SimpleNamespace(spec=spec), ours, model, ids, calls, tables)  # type: ignore[arg-type]


def _misses_beside(pair: SideBySide, held: Onboarded | None, field: str, logits: Tensor, seed: int) -> list[str]:
    ids = pair.ids
    bounds = torch.arange(0, ids.numel() + 1, ids.shape[1])
    with torch.no_grad():
        whole = relative_error(pair.ours(ids.flatten(), bounds).view(logits.shape), logits)
    found = {_WHOLE: whole, **dict(pair.handed())}
    lines = [f"{what} misses by {error:.1e}" for what, error in found.items() if not error <= TOLERANCE]
    before = None if held is None else _blocks(held.found.shrunk)
    readers = _readers(pair.reference, field)
    for place, site in pair.blocks():
        changed = before is not None and before.get(place.name) != _bare(place.spec)
        if changed or before is None or any(_related(place.path, reader) for reader in readers):
            lines += misses_of(place, site, torch.Generator().manual_seed(seed))
    return lines


def _blocks(spec: ModelSpec) -> dict[str, Any]:
    held = {
        f"{stack}.{index}.{part.name}": _bare(part.block)
        for stack, kinds in spec.stacks().items()
        for index, kind in enumerate(kinds)
        for part in kind.all_parts
    }
    return held | {"norm": _bare(spec.norm)}


def _bare(block: Any) -> Any:
    return block.model_dump_json(exclude={"proof"})


def _readers(model: torch.nn.Module, field: str) -> set[str]:
    """Paths of the modules that read the field, or what is inside it."""
    paths = model.config_reads.paths(model)  # type: ignore[union-attr, operator]
    prefix = model.config_reads.text  # type: ignore[union-attr]
    outer = f"{prefix}{field}".split(".")
    return {
        path
        for name, held in paths.items()
        if name.split(".")[: len(outer)] == outer or outer[: len(name.split("."))] == name.split(".")
        for path in held
    }


def _related(path: str, reader: str) -> bool:
    """Whether one is the other or inside it."""
    return not reader or path == reader or path.startswith(f"{reader}.") or reader.startswith(f"{path}.")


def misses_of_the_whole(held: Onboarded, seed: int) -> list[str]:
    """The same of the model as a whole, which has what no block by itself has: what parts read, what layers leave for
    one another, routers that are a part, what passes are handed. Weights small, as drawn and large; gradients of all
    parameters as drawn."""
    lines = []
    with tempfile.TemporaryDirectory() as folder:
        generated = load_shrunk(held.found, Path(folder))
        reference, _ = build(held.found.shrunk_config)
        generator = torch.Generator().manual_seed(seed)
        for gain in (0.3, 1.0, 3.0):
            redraw(reference, generator, gain)
            ids = torch.randint(3, generated.spec.tokens, (1, SEQUENCE), generator=generator)
            ours = load(generated, on_disk(reference))
            mine, theirs = ours(ids[0], torch.tensor([0, SEQUENCE])), run(reference, ids)[0]
            found = {"logits": relative_error(mine, theirs)}
            if gain == 1.0:
                cotangent = torch.randn(theirs.shape, generator=generator, dtype=torch.float64)
                found |= _gradient_errors(generated, (ours, mine), (reference, theirs), cotangent)
            limit = THRESHOLDS["L2"]
            lines += [f"{what} of weights x{gain}, seed {seed}: {e:.1e}" for what, e in found.items() if not e <= limit]
    return lines


def _gradient_errors(
    generated: Package, ours: tuple[Any, Tensor], reference: tuple[Any, Tensor], cotangent: Tensor
) -> dict[str, float]:
    """Errors of our parameters' gradients, by name. ours, reference: a model and its logits."""
    held = []
    for model, logits in (ours, reference):
        names = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
        grads = torch.autograd.grad(logits, list(names.values()), cotangent, allow_unused=True, materialize_grads=True)
        held.append(dict(zip(names, grads, strict=True)))
    stored = on_disk(reference[0], held[1])
    rules, shapes = bind(generated.rules), {name: tuple(tensor.shape) for name, tensor in stored.items()}
    floor = 1e-6 * max(float(torch.linalg.vector_norm(grad)) for grad in stored.values())
    return {
        f"gradient of {name}": relative_error(grad, rules[name].read(TensorsReader(stored), shapes).double(), floor)
        for name, grad in held[0].items()
    }
