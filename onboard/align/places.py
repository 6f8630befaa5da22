"""Where the blocks of a generated model stand, and the calls of the reference that they stand for."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from dayzero.onboard.align.divergence import joins, layer_path, path_of, stands_for
from dayzero.onboard.align.watched import Seen, watched
from dayzero.onboard.candidates.routing import routing_call
from dayzero.onboard.oracle.calls import Call, floats
from dayzero.onboard.structure.chains import chain_at
from dayzero.onboard.structure.loops import visits
from dayzero.onboard.structure.several import several, top_level
from dayzero.onboard.structure.stream_wiring import as_streams
from dayzero.runtime.nn.channel_scale import ChannelScale
from dayzero.runtime.nn.handed_routing import LeaveRouting
from dayzero.runtime.nn.projection import SideBySide as Beside
from dayzero.runtime.package import Package
from dayzero.runtime.spec import BlockSpec, LayerKind


@dataclass
class Place:
    """A block of the generated model. name: such as "layers.1.ffn"; path: of the reference module it stands for.
    joined: all that it gives matters, not the first alone. several: it reads more than one value of the stream.
    inside: a block that joins several modules, of which this one has its own."""

    name: str
    path: str
    spec: BlockSpec
    module: nn.Module
    joined: bool = False
    several: bool = False
    inside: bool = False

    @property
    def both(self) -> str:
        return f"{self.name}, for {self.path}"

    def call(self, calls: Mapping[str, Call], ids: Tensor, hidden: int, streams: int) -> Call | None:
        """The reference module's call as a function of what the block reads, and no more; None for what is no module.

        ids: [B, S], hidden: of one stream."""
        call = calls.get(self.path) or chain_at(calls, self.path)
        if call is None or isinstance(self.module, (ChannelScale, Beside)):
            return None
        if isinstance(self.module, LeaveRouting):
            return routing_call(call, self.module.router.experts) or call
        if self.inside:
            return as_streams(call, streams) if self.joined else call
        if self.several:
            call = visits(call)[-1]  # in a first pass some of what it reads may be missing
            shape = (*ids.shape, hidden)
            read = [
                n for n, held in top_level(call) if held.ndim in {3, 4} and (*held.shape[:2], held.shape[-1]) == shape
            ]
            return several(call, read, self.joined)
        return call


def layers_of(package: Package) -> str:
    """The path of the reference's list of layers."""
    first = package.spec.kinds_in_order()[0]
    return next(filter(None, (layer_path(block, 0) for block in first.blocks.values())), "").rpartition(".")[0]


def places(package: Package, ours: nn.Module) -> Iterator[Place]:
    """Every block of the model in the order in which it runs, layer by layer."""
    spec = package.spec

    def outside(name: str, block: BlockSpec | None, several: bool = False) -> Iterator[Place]:
        if block is not None:
            yield Place(name, path_of(block), block, ours.get_submodule(name), several=several)

    yield from outside("embed_norm", spec.embed_norm)
    yield from outside("layer_inputs", spec.layer_inputs)
    for stack, kinds in spec.stacks().items():
        for index, kind in enumerate(kinds):
            parts = dict(ours.get_submodule(f"{stack}.{index}").all_parts())  # type: ignore[operator]
            for part in kind.all_parts:
                place = Place(f"{stack}.{index}.{part.name}", path_of(part.block, index), part.block, parts[part.name])
                place.several, place.joined = "," in part.reads, _gives_several(kind, part.name)
                yield place
        if stack != "layers" and spec.encoder is not None:
            yield from outside("encoder.norm", spec.encoder.norm)
    yield from outside("loop.message", spec.loop.message if spec.loop is not None else None, several=True)
    yield from outside("merge", spec.merge, several=spec.history)
    yield from outside("norm", spec.norm)


def _gives_several(kind: LayerKind, part: str) -> bool:
    """Whether later values are made of one of several that the part gives, "name.1" of its values."""
    again = kind.again
    named = {part, *(step.name for step in again.steps if step.part == part)} if again else {part}
    texts = [kind.gives, kind.keeps, *(held.reads for held in kind.all_parts)]
    texts += [again.gives, *(step.reads for step in again.steps)] if again else []
    return any(re.search(rf"\b{name}\.\d", text) for name in named for text in texts)


def taken_apart(found: Iterator[Place], ours: nn.Module, ids: Tensor, calls: Mapping[str, Call]) -> Iterator[Place]:
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
                yield Place(child, call.path, spec, place.module.get_submodule(name), joined, inside=True)
