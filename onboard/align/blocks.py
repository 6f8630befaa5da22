"""L1: every distinct block of the generated model against the module that it stands for.

The blocks are those of the generated code, holding weights that came through the rules, and reading the rotary tables
of the generated model. Nothing of the search is asked again: what a parameter is made of is found once more by its
values.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.align.divergence import joins, layer_path, path_of, stands_for
from dayzero.onboard.align.ladder import THRESHOLDS, Rung, judge
from dayzero.onboard.align.loading import NotLoaded, loaded_pair
from dayzero.onboard.align.watched import Seen, watched
from dayzero.onboard.candidates.evidence import Candidate, Site, site_of
from dayzero.onboard.oracle.calls import Call, floats, record_calls
from dayzero.onboard.oracle.documents import documents
from dayzero.onboard.oracle.reference import state_of, text_config
from dayzero.onboard.prove.block import TOLERANCE, Attempt, attempt, relative_error
from dayzero.onboard.rules.expressions import NoRule, StoredValues, express
from dayzero.onboard.shrink.shrink import SEQUENCE
from dayzero.onboard.structure.chains import chain_at
from dayzero.onboard.structure.handed import tables_in
from dayzero.onboard.structure.stream_wiring import as_streams
from dayzero.runtime.nn import Context
from dayzero.runtime.nn.handed_routing import LeaveRouting
from dayzero.runtime.nn.router import Routing
from dayzero.runtime.package import Package
from dayzero.runtime.spec import BlockSpec

_GAINS = (1.0,)  # of the weights that are redrawn: the search has tried more


@dataclass
class Place:
    """A block of the generated model. name: such as "layers.1.ffn"; path: of the reference module it stands for.
    joined: all that it gives matters, not the first alone. alone: whether it is a function of one input."""

    name: str
    path: str
    spec: BlockSpec
    module: nn.Module
    joined: bool = False
    alone: bool = True

    @property
    def both(self) -> str:
        return f"{self.name}, for {self.path}"


def places(package: Package, ours: nn.Module) -> Iterator[Place]:
    """Every block of the model in the order in which it runs, layer by layer."""
    spec = package.spec
    outside = (("embed_norm", spec.embed_norm), ("merge", spec.merge), ("norm", spec.norm))
    if spec.embed_norm is not None:
        yield Place("embed_norm", path_of(spec.embed_norm), spec.embed_norm, ours.get_submodule("embed_norm"))
    for stack, kinds in spec.stacks().items():
        for index, kind in enumerate(kinds):
            for part in kind.all_parts:
                name = f"{stack}.{index}.{part.name}"
                module = dict(ours.get_submodule(f"{stack}.{index}").all_parts())[part.name]  # type: ignore[operator]
                alone = "," not in part.reads and not isinstance(module, (Routing, LeaveRouting))
                yield Place(name, path_of(part.block, index), part.block, module, alone=alone)
        if stack != "layers" and spec.encoder is not None:
            norm = ours.get_submodule("encoder.norm")
            yield Place("encoder.norm", path_of(spec.encoder.norm), spec.encoder.norm, norm)
    for name, block in outside[1:]:
        if block is not None:
            alone = not (name == "merge" and spec.history)
            yield Place(name, path_of(block), block, ours.get_submodule(name), alone=alone)


def _alone(found: Iterator[Place], ours: nn.Module, ids: Tensor, calls: Mapping[str, Call]) -> Iterator[Place]:
    """The places that stand for one module; those that join several as the blocks inside them."""
    seen: Seen | None = None
    for place in found:
        if not joins(place.spec):
            yield place
            continue
        seen = seen or watched(ours, ids)
        layer = layer_path(place.spec, int(place.name.split(".")[1]))
        inner = {path: call for path, call in calls.items() if path.startswith(f"{layer}.")}
        for name, spec in place.spec.arguments.items():
            child = f"{place.name}.{name}"
            if isinstance(spec, BlockSpec) and child in seen.calls and (call := stands_for(child, seen.calls, inner)):
                joined = len(floats(seen.calls[child].output)) > 1
                yield Place(child, call.path, spec, place.module.get_submodule(name), joined)


def blocks_rung(generated: Package, config: Mapping[str, Any]) -> Rung:
    """generated: the shrunk package, as its files were written and imported. config: the shrunk config.

    Of a block that joins several modules each block inside is proven against the module that reads and gives what it
    does. What joins them, parts with several inputs, routers that are a part and scales of a layer are left to L2."""
    try:
        pair = side_by_side(generated, config, seed=5)
    except NotLoaded as error:
        return judge({str(error): float("inf")}, THRESHOLDS["L1"])
    generator = torch.Generator().manual_seed(6)
    errors = {**dict(pair.rotaries()), **dict(pair.positions())}
    for place, site in pair.blocks():
        tried = _tried(place, site, generator)
        errors[f"{place.both}: {tried.objection or tried.where}"] = tried.error if tried.proven else _failed(tried)
    rung = judge(errors, THRESHOLDS["L1"])
    failed = [name for name, error in errors.items() if not error <= THRESHOLDS["L1"]]
    return rung.model_copy(update={"where": "; ".join(failed)}) if failed else rung


@dataclass
class SideBySide:
    """The generated model and the reference with the same weights, the calls of the reference's modules on documents
    ids [B, S], and the rotary tables of ours at their positions."""

    generated: Package
    ours: Any
    reference: nn.Module
    ids: Tensor
    calls: Mapping[str, Call]
    tables: tuple[tuple[Tensor, Tensor], ...]

    def rotaries(self) -> Iterator[tuple[str, float]]:
        """Each rotary table by name, and how far it is from the reference's."""
        for index, spec in enumerate(self.generated.spec.rotaries):
            error = _table_error(self.calls.get(path_of(spec)), self.tables[index], len(self.ids))
            yield f"rotaries.{index}, for {path_of(spec)}", error

    def positions(self) -> Iterator[tuple[str, float]]:
        """What is added to the embeddings of each stack by name, and how far it is from the reference's."""
        spec = self.generated.spec
        for name, block in (
            ("positions", spec.positions),
            ("encoder.positions", spec.encoder and spec.encoder.positions),
        ):
            if block is not None and (call := self.calls.get(path_of(block))) is not None:
                lengths = (self.ids.shape[1],) * self.ids.shape[0]
                mine = self.ours.get_submodule(name)(self.ids.flatten(), lengths, torch.float64)
                yield f"{name}, for {call.path}", relative_error(mine.view(call.result.shape), call.result)

    def blocks(self) -> Iterator[tuple[Place, Site]]:
        """Every distinct block that can be compared by itself, and the module that it stands for."""
        known: set[str] = set()
        for place in _alone(places(self.generated, self.ours), self.ours, self.ids, self.calls):
            key = re.sub(r"\d+", "*", place.both) + place.spec.model_dump_json(exclude={"proof"})
            call = self.calls.get(place.path) or chain_at(self.calls, place.path)
            if call is None or key in known or not place.alone:
                continue
            known.add(key)
            site = site_of(self.calls, call.path, text_config(self.reference))
            site.call = call
            if place.joined:
                site.call = as_streams(site.call, self.generated.spec.streams)
            yield place, _Site(site.call, site.inner, site.config, self.tables)


def side_by_side(generated: Package, config: Mapping[str, Any], seed: int) -> SideBySide:
    """Both models with weights and documents drawn from the seed. Raises NotLoaded."""
    ours, reference = loaded_pair(generated, config, seed)
    ids = documents(reference, generated.spec.tokens, SEQUENCE, torch.Generator().manual_seed(seed + 1))
    calls, _ = record_calls(reference, ids)
    position = torch.arange(SEQUENCE).repeat(len(ids))
    with torch.no_grad():
        tables = tuple(rotary(position, torch.float64) for rotary in ours.rotaries)
    return SideBySide(generated, ours, reference, ids, calls, tables)


def _failed(tried: Attempt) -> float:
    """An error that fails the rung: operations that differ leave no number behind."""
    return tried.error if tried.error > TOLERANCE else float("inf")


def _table_error(call: Call | None, table: tuple[Tensor, Tensor], batch: int) -> float:
    """How far the tables are from the nearest that the module gives; 0 where it gives none that can be read."""
    if call is None:
        return 0.0
    errors = []
    for made in (call, *call.later):
        for theirs in tables_in(made.output, batch, SEQUENCE):
            rows = len(theirs.cos)
            errors.append(
                max(relative_error(a[:rows], b) for a, b in zip(table, (theirs.cos, theirs.sin), strict=True))
            )
    return min(errors, default=0.0)


@dataclass
class _Site(Site):
    """A module as it was called, but with the rotary tables of the generated model."""

    tables: tuple[tuple[Tensor, Tensor], ...] = ()

    @property
    def context(self) -> Context:
        return replace(super().context, tables=self.tables)


@dataclass
class _Generated(Candidate):
    """A block that is there already, and the same block for every trial."""

    made: nn.Module = field(default_factory=nn.Module)
    copied: bool = False

    @property
    def lifts(self) -> list:
        return [None] if self.copied else []

    def build(self, module: nn.Module, config: Any) -> nn.Module:
        return copy.deepcopy(self.made)


def _tried(place: Place, site: Site, generator: torch.Generator) -> Attempt:
    """The block against its module, on the captured input and on others, as the search tries a candidate."""
    try:
        candidate = as_candidate(place, site)
    except NoRule as error:
        return Attempt(Candidate(place.spec.block, {}, {}), float("inf"), "weights", str(error))
    return attempt(candidate, site, generator, thorough=True, gains=_GAINS, leaves_all=False)


def as_candidate(place: Place, site: Site) -> Candidate:
    """The generated block as a claim about the module, its parameters found in the module's by their values.

    Raises NoRule for a parameter that holds something else."""
    copied = any(block.block == "Lifted" for block in place.spec.walk())
    candidate = _Generated(place.spec.block, {}, {}, made=place.module, copied=copied)
    stored, sources = StoredValues(state_of(site.module)), {}
    for name, value in {**dict(place.module.named_parameters()), **dict(place.module.named_buffers())}.items():
        try:
            sources[name] = express(value.detach(), stored)
        except NoRule:
            raise NoRule(f"{name} does not hold what {place.path} does") from None
    candidate.parameters = sources
    return candidate
