"""L1: every distinct block of the generated model against the module that it stands for.

The blocks are those of the generated code, holding weights that came through the rules, and reading the rotary tables
of the generated model. Nothing of the search is asked again: what a parameter is made of is found once more by its
values.
"""

import copy
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.align.divergence import path_of, scaled_by_the_model
from dayzero.onboard.align.handed import (
    LayerInputsCall,
    layer_inputs_call,
    left_for_later,
    on_other_messages,
    owned_scale,
    scale_error,
    without_held,
)
from dayzero.onboard.align.ladder import THRESHOLDS, Rung, judge
from dayzero.onboard.align.loading import NotLoaded, loaded_pair
from dayzero.onboard.align.places import Place, layers_of, places, taken_apart
from dayzero.onboard.candidates.evidence import Candidate, Site, site_of
from dayzero.onboard.candidates.positions import on_ids, with_first_ids
from dayzero.onboard.oracle.calls import Call, record_calls
from dayzero.onboard.oracle.documents import documents
from dayzero.onboard.oracle.reference import state_of, text_config
from dayzero.onboard.prove.block import TOLERANCE, Attempt, attempt, relative_error
from dayzero.onboard.rules.expressions import NoRule, StoredValues, express
from dayzero.onboard.shrink.shrink import SEQUENCE
from dayzero.onboard.structure.handed import tables_in
from dayzero.onboard.structure.loops import LoopParts, loop_of, message_call
from dayzero.runtime.nn import Context
from dayzero.runtime.nn.channel_scale import ChannelScale
from dayzero.runtime.nn.lifted_operator import custom_of
from dayzero.runtime.package import Package
from dayzero.runtime.spec import LoopSpec

_GAINS = (1.0,)  # of the weights that are redrawn: the search has tried more


def blocks_rung(generated: Package, config: Mapping[str, Any]) -> Rung:
    """generated: the shrunk package, as its files were written and imported. config: the shrunk config.

    Of a block that joins several modules each block inside is proven against the module that reads and gives what it
    does. Sums, and what joins blocks, are left to L2."""
    try:
        pair = side_by_side(generated, config, seed=5)
    except NotLoaded as error:
        return judge({str(error): float("inf")}, THRESHOLDS["L1"])
    generator = torch.Generator().manual_seed(6)
    errors = dict(pair.handed())
    others: list[str] = []
    for place, site in pair.blocks():
        tried = _tried(place, site, generator)
        custom = custom_of(place.module)
        both = f"{place.both}, by {' and '.join(custom)}" if custom else place.both
        if tried.apart and custom:  # written by hand to be faster: it may take another way to the same values
            others.append(
                f"{both}, has other operations than the reference, to be compared by reading: {tried.objection}"
            )
            tried = replace(tried, objection="")
        errors[f"{both}: {tried.objection or tried.where}"] = tried.error if tried.proven else _failed(tried)
    rung = judge(errors, THRESHOLDS["L1"])
    failed = [name for name, error in errors.items() if not error <= THRESHOLDS["L1"]]
    if others and not failed:
        return rung.model_copy(update={"verdict": "WARN", "where": "; ".join(others)})
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
        """What is added to the embeddings of each stack by name, and how far it is from the reference's: for text, and
        with ids among it that may not count."""
        spec = self.generated.spec
        for name, block in (
            ("positions", spec.positions),
            ("encoder.positions", spec.encoder and spec.encoder.positions),
        ):
            if block is not None and (call := self.calls.get(path_of(block))) is not None:
                module = self.ours.get_submodule(name)
                made = [on_ids(module, call, self.ids, ids) for ids in (self.ids, with_first_ids(self.ids))]
                found = [float("inf") if pair is None else relative_error(*pair) for pair in made]
                yield f"{name}, for {call.path}", max(found)

    def query_scales(self) -> Iterator[tuple[str, float]]:
        """How far the factors by position that the model hands to its layers are from those of the reference."""
        paths = scaled_by_the_model(self.generated.spec)
        if handed := [self.calls[path] for path in paths if path in self.calls]:
            position = torch.arange(self.ids.shape[1]).repeat(len(self.ids))
            ours = self.ours.query_scale
            error = float("inf") if ours is None else scale_error(handed, ours(position, torch.float64))
            yield f"query_scale, for what {handed[0].path} is handed", error

    def scales(self) -> Iterator[tuple[str, float]]:
        """How far each part that multiplies by a vector of its layer is from that."""
        for place in places(self.generated, self.ours):
            if isinstance(place.module, ChannelScale):
                yield place.both, owned_scale(place, self.reference)

    def passes(self) -> Iterator[tuple[str, float]]:
        """Whether the same layers run several times as in the reference, and do the same when they run again."""
        loop = self.loop
        if loop is not None or self.generated.spec.loop is not None:
            right = _runs(self.generated.spec.loop) == _runs(loop)
            yield f"loop, which runs layers {_runs(self.generated.spec.loop)}", 0.0 if right else float("inf")
        if loop is not None:
            layers = layers_of(self.generated)
            yield from on_other_messages(self.generated.spec, self.ours, self.calls, loop, layers, self._context)

    def _context(self, site: Site) -> Context:
        """The context of a module, with the rotary tables of the generated model."""
        return replace(site.context, tables=self.tables)

    def handed(self) -> Iterator[tuple[str, float]]:
        """All that is compared by its values alone."""
        for found in (self.rotaries(), self.positions(), self.query_scales(), self.scales(), self.passes()):
            yield from found
        yield from left_for_later(self.all_blocks())

    @cached_property
    def loop(self) -> LoopParts | None:
        """Which layers of the reference run several times."""
        return loop_of(self.calls, layers_of(self.generated), self.generated.spec.layer_count)

    def blocks(self) -> Iterator[tuple[Place, Site]]:
        """Every distinct block that can be compared by itself, and the module that it stands for."""
        known: set[str] = set()
        for place, site in self.all_blocks():
            key = re.sub(r"\d+", "*", place.both) + place.spec.model_dump_json(exclude={"proof"})
            if key not in known:
                known.add(key)
                yield place, site

    def all_blocks(self) -> Iterator[tuple[Place, Site]]:
        """The same of every block, in the order in which they run."""
        spec = self.generated.spec
        for place in taken_apart(places(self.generated, self.ours), self.ours, self.ids, self.calls):
            if place.name == "loop.message":
                held = self.loop
                call = None if held is None or held.message is None else message_call(self.calls, held)
            elif place.name == "layer_inputs":
                call = layer_inputs_call(self.calls, place.path, layers_of(self.generated), self.ids)
            else:
                call = place.call(self.calls, self.ids, spec.hidden, spec.streams)
            if call is None:
                continue
            site = site_of(self.calls, call.path, text_config(self.reference))
            yield place, _Site(call, site.inner, site.config, self.tables)


def _runs(loop: LoopSpec | LoopParts | None) -> str:
    if loop is None:
        return "once"
    last = loop.first + loop.count - 1
    return f"{loop.first}-{last} {loop.passes} times, each {'from where the first began' if loop.restarts else 'on'}"


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
    tried = attempt(candidate, site, generator, thorough=True, gains=_GAINS, leaves_all=False)
    if isinstance(site.call, LayerInputsCall):
        return replace(tried, objection=without_held(tried.objection, site.call))
    return tried


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
