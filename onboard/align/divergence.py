"""Which part of a model that misses its reference is the first to do so.

Both run on one document with their modules watched: what each part reads, what it gives, what each layer gives, pass by
pass where layers run several times. An input that differs where all before it agrees accuses the sum that makes it; an
output of an input that agrees, the part.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.align.ladder import THRESHOLDS
from dayzero.onboard.align.loading import NotLoaded, loaded_pair
from dayzero.onboard.align.watched import OurCall, Seen, watched
from dayzero.onboard.candidates.routing import routing_call
from dayzero.onboard.oracle.calls import Call, floats, record_calls
from dayzero.onboard.prove.block import relative_error
from dayzero.onboard.shrink.shrink import SEQUENCE
from dayzero.onboard.structure.chains import ChainCall, chain_at
from dayzero.onboard.structure.handed import query_scale
from dayzero.onboard.structure.layer_inputs import handed_to_layers
from dayzero.onboard.structure.loops import inside_visit, visits
from dayzero.runtime.nn.handed_routing import LeaveRouting
from dayzero.runtime.package import Package
from dayzero.runtime.spec import BlockSpec, LayerKind, LoopSpec, ModelSpec, StepSpec


def first_divergence(generated: Package, config: Mapping[str, Any]) -> str:
    """One line: the part and what it stands for, "" where the forward pass shows no difference."""
    try:
        ours, reference = loaded_pair(generated, config, seed=7)
    except NotLoaded as error:
        return str(error)
    ids = torch.randint(3, generated.spec.tokens, (1, SEQUENCE), generator=torch.Generator().manual_seed(8))
    return first_to_differ(generated.spec, ours, reference, ids)


def first_to_differ(spec: ModelSpec, ours: nn.Module, reference: nn.Module, ids: Tensor) -> str:
    """The same of two models with the same weights on documents [B, S]."""
    calls, logits = record_calls(reference, ids)
    seen = watched(ours, ids)
    if first := _first(_Walk(spec, seen, calls).pairs(), seen):
        return first
    if seen.logits is None:
        return f"the logits, which are not reached: {seen.stopped}"
    return "" if agree(seen.logits, logits) else "the logits, their scale or their cap"


def first_in_layer(spec: ModelSpec, index: int, number: int, seen: Seen, calls: Mapping[str, Call]) -> str:
    """The same of one layer of the decoder in pass `number`, from 0: seen: of that run alone; calls: of the reference,
    of that pass."""
    kind = spec.kinds_in_order()[index]
    mine, where = seen.visit(f"layers.{index}", 0), layer_path(kind.parts[0].block, index)
    inside = {path: call for path, call in calls.items() if f"{path}.".startswith(f"{where}.")}
    return _first(_Walk(spec, seen, calls).layer("layers", index, kind, number, mine, calls.get(where), inside), seen)


def _first(pairs: "Iterator[_Pair]", seen: Seen) -> str:
    for pair in pairs:
        if pair.wrong is None and seen.stopped:
            return f"{pair.what}, which does not run: {seen.stopped}"
        if pair.wrong is not False:
            return pair.what
    return ""


def agree(mine: Tensor, theirs: Tensor) -> bool:
    """Whether they are the same values, whatever the leading dimensions."""
    return mine.numel() == theirs.numel() and relative_error(mine.reshape(theirs.shape), theirs) <= THRESHOLDS["L2"]


def stands_for(name: str, ours: Mapping[str, OurCall], calls: Mapping[str, Call]) -> Call | None:
    """The call that read what our module `name` read and gave what it gave; if none gave that, one that gave as much.
    None where none read it."""
    read, mine = ours[name].read, ours[name].given
    alike = [call for call in calls.values() if call.has_stream and read and agree(read[0], call.hidden)]
    if mine is None:
        return alike[0] if alike else None
    alike = [call for call in alike if any(out.numel() == mine.numel() for out in floats(call.output))]
    alike.sort(key=lambda call: (not any(agree(mine, out) for out in floats(call.output)), len(call.path)))
    return alike[0] if alike else None


@dataclass(frozen=True)
class _Pair:
    """what: it is. wrong: whether ours is none of the reference's values; None where ours did not come to it."""

    what: str
    wrong: bool | None


def _pair(what: str, mine: Tensor | None, theirs: list[Tensor]) -> _Pair:
    return _Pair(what, None if mine is None else not any(agree(mine, value) for value in theirs))


@dataclass
class _Walk:
    """Both models from the embeddings on, in the order in which values are made."""

    spec: ModelSpec
    seen: Seen
    calls: Mapping[str, Call]

    def pairs(self) -> Iterator[_Pair]:
        spec = self.spec
        if spec.embed_norm is not None and (call := self.calls.get(path_of(spec.embed_norm))) is not None:
            mine = self.seen.visit("embed_norm", 0)
            read = None if mine is None else mine.read[0]
            yield _pair("what embed_norm reads, the embeddings and their scale", read, [call.hidden])
            yield _pair(f"embed_norm, for {call.path}", mine and mine.given, [call.result])
        yield from self._handed()
        for stack, index, kind, number in self._layers():
            if number and index == (spec.loop.first if spec.loop else 0):
                yield from self._messages(number)
            yield from self._visit(stack, index, kind, number)
        for name, block in (("merge", spec.merge), ("norm", spec.norm)):
            if block is not None and (call := self.calls.get(path_of(block))) is not None:
                mine = self.seen.visit(name, 0)
                yield _pair(f"{name}, for {call.path}", mine and mine.given, [call.result])

    def _handed(self) -> Iterator[_Pair]:
        """What the model makes for its layers before the first of them runs."""
        first = layer_path(self.spec.kinds_in_order()[0].parts[0].block, 0).rpartition(".")[0]
        mine = self.seen.visit("layer_inputs", 0)
        if self.spec.layer_inputs is not None and (made := handed_to_layers(self.calls, first)) is not None:
            yield _pair(f"layer_inputs, for {path_of(self.spec.layer_inputs)}", mine and mine.given, [made])
        mine = self.seen.visit("query_scale", 0)
        for path in scaled_by_the_model(self.spec) if self.spec.query_scale is not None else ():
            factors = query_scale(self.calls[path]) if path in self.calls else None
            theirs = [] if factors is None else [factors]
            yield _pair(f"query_scale, for what {path} is handed", mine and mine.given, theirs)

    def _layers(self) -> Iterator[tuple[str, int, LayerKind, int]]:
        """(stack, number of the layer in it, its kind, pass from 0) in the order in which they run."""
        for stack, kinds in self.spec.stacks().items():
            loop = self.spec.loop if stack == "layers" else None
            loop = loop or LoopSpec(first=len(kinds), count=0, passes=1)
            looped = range(loop.first, loop.first + loop.count)
            for number in range(loop.passes):
                for index, kind in enumerate(kinds):
                    if index in looped or number == (0 if index < loop.first else loop.passes - 1):
                        yield stack, index, kind, number if index in looped else 0

    def _messages(self, number: int) -> Iterator[_Pair]:
        """What the layers of that pass are handed of the one before."""
        loop = self.spec.loop
        if loop is None or loop.message is None or (call := self.calls.get(path_of(loop.message))) is None:
            return
        name, mine = _in_pass("loop.message", number), self.seen.visit("loop.message", number - 1)
        runs = visits(call)[(number - 1) * loop.count : number * loop.count]
        theirs = [one for run in runs for held in floats(run.args) for one in _apart(held)]
        yield from self._read(f"what {name} reads", mine, theirs)
        made = [one for run in runs for one in run.result.unbind(2)]
        given = [] if mine is None else floats(mine.output)
        wrong = len(given) != len(made) or not all(map(agree, given, made))
        yield _Pair(f"{name}, for {call.path}", wrong if given else None)
        for index, run in enumerate(runs, loop.first):
            mine = self.seen.visit(f"layers.{index}", number)
            handed = () if mine is None else mine.args[1].message or ()
            own = run.result.unbind(2)
            wrong = len(handed) != len(own) or not all(map(agree, handed, own))
            yield _Pair(f"loop, which hands {_in_pass(f'layers.{index}', number)} messages", wrong if mine else None)

    def _read(self, what: str, mine: OurCall | None, theirs: list[Tensor]) -> Iterator[_Pair]:
        for value in mine.read if mine is not None else ():
            yield _pair(what, value, theirs)
        if mine is None:
            yield _Pair(what, None)

    def _visit(self, stack: str, index: int, kind: LayerKind, number: int) -> Iterator[_Pair]:
        layer, where = f"{stack}.{index}", layer_path(kind.parts[0].block, index)
        theirs = self.calls.get(where)
        runs: list[Call] = [] if theirs is None else visits(theirs)
        if theirs is not None and number >= len(runs):
            yield _Pair(f"{_in_pass(layer, number)}, which runs {len(runs)} times in the reference", True)
            return
        run = runs[number] if runs else None
        calls = self.calls if run is None else {where: run, **inside_visit(self.calls, where, number)}
        yield from self.layer(stack, index, kind, number, self.seen.visit(layer, number), run, calls)

    def layer(
        self,
        stack: str,
        index: int,
        kind: LayerKind,
        number: int,
        mine: OurCall | None,
        run: Call | None,
        calls: Mapping[str, Call],
    ) -> Iterator[_Pair]:
        """One run of a layer. mine, run: its calls; calls: of the reference's modules inside it."""
        layer, where = f"{stack}.{index}", layer_path(kind.parts[0].block, index)
        inside = {} if mine is None else self.seen.during(mine)
        if run is not None:
            alike = [made for made in floats((run.args, run.kwargs)) if made.shape == run.result.shape]
            if alike:
                first = ", the embeddings" if not index and not number else ""
                yield _pair(f"what {_in_pass(layer, number)} reads{first}", mine and mine.stream, alike)
        again = kind.again if number else None
        blocks = {part.name: part for part in kind.all_parts}
        steps = again.steps if again else [StepSpec(name=p.name, part=p.name, reads=p.reads) for p in kind.parts]
        runs: dict[str, int] = {}
        for step in steps:
            runs[step.part] = use = runs.get(step.part, 0) + 1
            part = blocks[step.part]
            name = self._name(layer, index, part.name) if part.shared else f"{layer}.{part.name}"
            ours = inside.get(_used(name, use))
            label = _in_pass(f"{layer}.{part.name}", number) + (f" as {step.name}" if step.name != part.name else "")
            path = path_of(part.block, index)
            call = calls.get(_used(path, use)) if path != where or len(blocks) == 1 else None
            call = call or chain_at(calls, path)
            if call is not None and call.has_stream:
                handed = [call.hidden] if isinstance(call, ChainCall) else floats((call.args, call.kwargs))
                read = [one for held in handed for one in _apart(held)]
                yield from self._read(f"what {label} reads, {step.reads!r}", ours, read)
                yield _pair(f"{label}, for {path}", ours and ours.given, _given(call, ours))
            elif run is not None:
                yield from _inside(name, inside, {p: c for p, c in calls.items() if p != where})
        if run is not None:
            gives = again.gives if again else kind.gives
            yield _pair(f"what {_in_pass(layer, number)} gives, {gives!r}", mine and mine.given, [run.result])

    def _name(self, layer: str, index: int, part: str) -> str:
        """The module of a part that the layer shares with others."""
        _, which, _ = self.spec.uses()[index]
        return f"shared.{which}.{part}" if which is not None else f"{layer}.{part}"


def _in_pass(name: str, number: int) -> str:
    return f"{name} in pass {number + 1}" if number else name


def _used(path: str, use: int) -> str:
    return path if use == 1 else f"{path}@{use}"


def _given(call: Call, ours: OurCall | None) -> list[Tensor]:
    """What the reference gave, in the form in which our module gives it."""
    if ours is not None and isinstance(ours.module, LeaveRouting):
        routed = routing_call(call, ours.module.router.experts)
        return [] if routed is None else [routed.result]
    return floats(call.output)


def _apart(held: Tensor) -> list[Tensor]:
    """A value, and of a stack [B, S, n, H] its members too."""
    return [held, *held.unbind(2)] if held.ndim == 4 else [held]


def _inside(part: str, ours: Mapping[str, OurCall], calls: Mapping[str, Call]) -> Iterator[_Pair]:
    """The children of a part that stands for several modules, each beside the one that reads what it reads."""
    for name, mine in ours.items():
        if name.rpartition(".")[0] == part and (call := stands_for(name, ours, calls)) is not None:
            yield _pair(f"{name.partition('@')[0]}, for {call.path}", mine.given, floats(call.output))


def scaled_by_the_model(spec: ModelSpec) -> list[str]:
    """Paths of the modules that the model hands factors of their queries."""
    return [
        path_of(part.block, index)
        for kinds in spec.stacks().values()
        for index, kind in enumerate(kinds)
        for part in kind.all_parts
        if any(block.arguments.get("query_scale") == "handed" for block in part.block.walk())
    ]


def path_of(block: BlockSpec, layer: int = 0) -> str:
    """Path of the reference module that the block of that layer stands for, "" where that is not one module."""
    return "" if block.proof is None or joins(block) else block.proof.module.replace("{layer}", str(layer))


def joins(block: BlockSpec) -> bool:
    """Whether the block is put together from blocks that stand for several modules of a layer."""
    inner = any(isinstance(argument, BlockSpec) for argument in block.arguments.values())
    return inner and block.block != "Lifted" and block.proof is not None and block.proof.module.endswith("{layer}")


def layer_path(block: BlockSpec, layer: int) -> str:
    """Path of the reference's layer, from that of a block inside it."""
    start, inside, _ = (block.proof.module if block.proof else "").partition("{layer}")
    return f"{start}{layer}" if inside else ""
