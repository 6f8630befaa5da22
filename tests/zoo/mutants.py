"""Single semantic mutations of a passing package, and the ladder climbed with each.

    found = climbed("mixtral", Mutant("window by one", "mixtral", r"mixer", argument("mixer.window", 6)))
    found.verdict, found.accused            # "FAIL", what the failing rungs name

A mutant changes one thing: an argument of a block, the wiring of a layer, a weight rule, or a line of a block's code.
Of the specification both the real model and the shrunk one are changed, as a wrong claim of the search would change
them. The comparison on the real weights takes no part: a checkpoint of a trillion parameters would not have it.
"""

import contextlib
import functools
import importlib
import inspect
import tempfile
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from zoo.conformance import write_checkpoint

from dayzero.onboard import specify
from dayzero.onboard.align.climb import climb
from dayzero.onboard.checkpoint import Checkpoint, read_checkpoint
from dayzero.onboard.inspect.classify import classify, settle
from dayzero.onboard.rules.unmapped import fates
from dayzero.onboard.specify import Specification
from dayzero.onboard.specify_checkpoint import real_shapes
from dayzero.runtime.errors import InputError
from dayzero.runtime.spec import BlockSpec, LayerKind, LayerRun, ModelSpec, PartSpec, SourceSpec

Change = Callable[[ModelSpec], ModelSpec]


@dataclass(frozen=True)
class Mutant:
    """name: what is wrong. family: of the package. change: of its specification. code: (module of runtime, line, line
    in its place). accused: a pattern that what the ladder names must match. rung: by which it must be named, "" for
    any."""

    name: str
    family: str
    accused: str
    change: Change | None = None
    code: tuple[str, str, str] | None = None
    rung: str = ""


@dataclass(frozen=True)
class Climbed:
    """verdict: of the ladder, or REFUSED where rules and tensors do not settle. accused: what the rungs that fail
    name. by: that, by rung. warned: what the rungs that warn name."""

    verdict: str
    accused: str
    by: Mapping[str, str] = field(default_factory=dict)
    warned: str = ""


@functools.cache
def specified(family: str) -> tuple[Checkpoint, Specification]:
    """A small checkpoint of the family and its specification, made once a process; config fields are not varied."""
    held = tempfile.TemporaryDirectory()
    _FOLDERS.append(held)
    checkpoint = read_checkpoint(write_checkpoint(family, Path(held.name) / family))
    with mock.patch.object(specify, "intervene", return_value=[]):
        found = specify.specify(checkpoint.config, checkpoint.identity(), family, headers=checkpoint.headers)
    return checkpoint, found


_FOLDERS: list[Any] = []


def climbed(family: str, mutant: Mutant | None = None) -> Climbed:
    """The ladder as `onboard align` climbs it, over the package with the mutation."""
    checkpoint, found = specified(family)
    if mutant is not None and mutant.change is not None:
        changed = {"spec": mutant.change(found.spec), "shrunk": mutant.change(found.shrunk)}
        assert changed["spec"] != found.spec
        assert changed["shrunk"] != found.shrunk
        found = found.model_copy(update=changed)
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("dayzero.onboard.align.climb.real_weights_error", return_value=None))
        if mutant is not None and mutant.code is not None:
            stack.enter_context(other_code(*mutant.code))
        try:
            shapes, others = real_shapes(found.spec), fates(found.idle, found.tables)
            ledger = settle(classify(checkpoint), checkpoint, found.spec, shapes, found.towers, others)
        except InputError as error:
            return Climbed("REFUSED", str(error))
        except (ValueError, RuntimeError, KeyError) as error:
            return Climbed("REFUSED", f"model and rules do not belong together: {error}")
        alignment = climb(checkpoint, found, ledger, lambda line: None)
    failed = {name: rung.where for name, rung in alignment.rungs.items() if rung.verdict == "FAIL"}
    warned = "; ".join(rung.where for rung in alignment.rungs.values() if rung.verdict == "WARN")
    return Climbed(alignment.verdict, "; ".join(failed.values()), failed, warned)


@contextlib.contextmanager
def other_code(name: str, old: str, new: str) -> Iterator[None]:
    """The module `dayzero.runtime.<name>` with one piece of its source replaced, in every function that has it."""
    module = importlib.import_module(f"dayzero.runtime.{name}")
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{name} has {source.count(old)} of {old!r}"
    scratch = types.ModuleType(module.__name__)
    scratch.__dict__.update(__file__=module.__file__, __package__=module.__package__)
    exec(compile(source.replace(old, new), str(module.__file__), "exec"), scratch.__dict__)
    changed = []
    for here, there in ((module, scratch), *_classes(module, scratch)):
        for key, function in vars(here).items():
            other = vars(there).get(key)
            if not isinstance(function, types.FunctionType) or not isinstance(other, types.FunctionType):
                continue
            if function.__module__ == module.__name__ and function.__code__ != other.__code__:
                changed.append((function, function.__code__))
                function.__code__ = other.__code__
    assert changed
    try:
        yield
    finally:
        for function, code in changed:
            function.__code__ = code


def _classes(module: Any, scratch: Any) -> list[tuple[type, type]]:
    own = [key for key, held in vars(module).items() if isinstance(held, type) and held.__module__ == module.__name__]
    return [(vars(module)[key], vars(scratch)[key]) for key in own]


# --- changes --------------------------------------------------------------------------------------------------------


def argument(path: str, value: Any) -> Change:
    """The argument at `path`, such as "ffn.router.scale", in every kind of layer whose block has it; of the blocks
    outside the layers "norm.eps", of the n-th rotary "rotaries.0.theta", of what layers are handed of the pass before
    "loop.message.scale". value: or a function of the present one."""
    part, *names = path.split(".")

    def change(spec: ModelSpec) -> ModelSpec:
        if part in {"norm", "query_scale", "layer_inputs"}:
            return spec.model_copy(update={part: _with(getattr(spec, part), names, value)})
        if part == "rotaries":
            index, *inner = names
            rotaries = list(spec.rotaries)
            rotaries[int(index)] = _with(rotaries[int(index)], inner, value)
            return spec.model_copy(update={"rotaries": rotaries})
        if part == "loop":
            assert spec.loop is not None
            assert spec.loop.message is not None
            message = _with(spec.loop.message, names[1:], value)
            return spec.model_copy(update={"loop": spec.loop.model_copy(update={"message": message})})
        return spec.model_copy(
            update={"layer_kinds": [_with_part(kind, part, names, value) for kind in spec.layer_kinds]}
        )

    return change


def _with_part(kind: LayerKind, part: str, names: list[str], value: Any) -> LayerKind:
    """The kind with one argument of the block of a part changed, be it one that runs in later passes only."""

    def changed(parts: list[PartSpec]) -> list[PartSpec]:
        return [
            held.model_copy(update={"block": _with(held.block, names, value)}) if held.name == part else held
            for held in parts
        ]

    again = kind.again and kind.again.model_copy(update={"parts": changed(kind.again.parts)})
    return kind.model_copy(update={"parts": changed(kind.parts), "again": again})


def _with(block: BlockSpec, names: list[str], value: Any) -> BlockSpec:
    """The block with one argument changed; as it is where it has none at that place."""
    name, *inner = names
    if name not in block.arguments:
        return block
    held = block.arguments[name]
    if inner:
        made = _with(held, inner, value) if isinstance(held, BlockSpec) else held
    else:
        made = value(held) if callable(value) else value
    return _given(block, name, made)


def wired(part: str, reads: str | None = None, gives: str | None = None) -> Change:
    """What a part reads, or what a layer that has the part gives, written otherwise."""

    def change(spec: ModelSpec) -> ModelSpec:
        kinds: list[LayerKind] = []
        for kind in spec.layer_kinds:
            there = any(held.name == part for held in kind.parts)
            parts = [
                held.model_copy(update={"reads": reads}) if held.name == part and reads is not None else held
                for held in kind.parts
            ]
            kinds.append(kind.model_copy(update={"parts": parts, "gives": gives if there and gives else kind.gives}))
        return spec.model_copy(update={"layer_kinds": kinds})

    return change


def wired_again(value: str, reads: str) -> Change:
    """What the part reads that makes a value of a later pass, written otherwise, in every layer that has the value."""

    def change(spec: ModelSpec) -> ModelSpec:
        kinds = []
        for kind in spec.layer_kinds:
            again = kind.again
            if again is not None and any(step.part == "mixer_input_2" for step in again.steps if step.name == value):
                steps = [
                    step.model_copy(update={"reads": reads}) if step.name == value else step for step in again.steps
                ]
                again = again.model_copy(update={"steps": steps})
            kinds.append(kind.model_copy(update={"again": again}))
        return spec.model_copy(update={"layer_kinds": kinds})

    return change


def looped(**fields: Any) -> Change:
    """Fields of the loop, as functions of what they are."""

    def change(spec: ModelSpec) -> ModelSpec:
        assert spec.loop is not None
        held = {name: made(getattr(spec.loop, name)) for name, made in fields.items()}
        return spec.model_copy(update={"loop": spec.loop.model_copy(update=held)})

    return change


def whole(**fields: Any) -> Change:
    """Fields of the model itself."""
    return lambda spec: spec.model_copy(update=fields)


def positions(name: str, made: Any) -> Change:
    """An argument of what is added to the decoder's embeddings, as a function of what it is."""

    def change(spec: ModelSpec) -> ModelSpec:
        assert spec.positions is not None
        block = _given(spec.positions, name, made(spec.positions.arguments[name]))
        return spec.model_copy(update={"positions": block})

    return change


def left_by_the_one_before(spec: ModelSpec) -> ModelSpec:
    """What a kind of layer leaves for later ones is left by the kind before it."""
    kinds = list(spec.layer_kinds)
    for number in range(1, len(kinds)):
        if (name := kinds[number].blocks["mixer"].arguments.get("leaves")) is None:
            continue
        for other, leaves in ((number, None), (number - 1, name)):
            parts = [
                part.model_copy(update={"block": _given(part.block, "leaves", leaves)})
                if part.name == "mixer"
                else part
                for part in kinds[other].parts
            ]
            kinds[other] = kinds[other].model_copy(update={"parts": parts})
    return spec.model_copy(update={"layer_kinds": kinds})


def _given(block: BlockSpec, name: str, value: Any) -> BlockSpec:
    return block.model_copy(update={"arguments": {**block.arguments, name: value}})


def exchanged_layers(spec: ModelSpec) -> ModelSpec:
    """The last kind of layer one layer early: layers n-1 and n have each other's kind."""
    order = [run.kind for run in spec.layers for _ in range(run.count)]
    place = next(i for i in range(len(order) - 1, 0, -1) if order[i] != order[i - 1])
    order[place - 1], order[place] = order[place], order[place - 1]
    return spec.model_copy(update={"layers": [LayerRun(first=i, count=1, kind=kind) for i, kind in enumerate(order)]})


def rule(ending: str, change: Callable[[SourceSpec], SourceSpec]) -> Change:
    """The expression of the parameters whose names end so."""

    def changed(spec: ModelSpec) -> ModelSpec:
        rules = [
            held.model_copy(update={"source": change(held.source)}) if held.parameter.endswith(ending) else held
            for held in spec.rules
        ]
        return spec.model_copy(update={"rules": rules})

    return changed


def exchanged_rules(one: str, two: str) -> Change:
    """Two parameters of every layer filled from each other's tensors."""

    def changed(spec: ModelSpec) -> ModelSpec:
        sources = {held.parameter: held.source for held in spec.rules}
        rules = []
        for held in spec.rules:
            name = held.parameter
            other = (
                name.replace(one, two) if name.endswith(one) else name.replace(two, one) if name.endswith(two) else ""
            )
            rules.append(held.model_copy(update={"source": sources[other]}) if other in sources else held)
        return spec.model_copy(update={"rules": rules})

    return changed


def reversed_parts(source: SourceSpec) -> SourceSpec:
    """Side by side in the other order: up before gate."""
    if source.op == "concat":
        return source.model_copy(update={"parts": list(reversed(source.parts))})
    return source.model_copy(update={"parts": [reversed_parts(part) for part in source.parts]})


def untransposed(source: SourceSpec) -> SourceSpec:
    return source.parts[0] if source.op == "transpose" else source


def in_order(source: SourceSpec) -> SourceSpec:
    """Rows as they lie, where they should be taken apart."""
    return source.parts[0] if source.op == "deinterleave" else source


def experts_exchanged(source: SourceSpec) -> SourceSpec:
    """Experts 0 and 1 in each other's place."""
    if source.op != "stack":
        return source.model_copy(update={"parts": [experts_exchanged(part) for part in source.parts]})
    singles = [_expert(source.parts[0], number) for number in range(source.count or 0)]
    singles[0], singles[1] = singles[1], singles[0]
    rows = [SourceSpec(op="unsqueeze", dims=(0,), parts=[single]) for single in singles]
    return SourceSpec(op="concat", dim=0, parts=rows)


def _expert(source: SourceSpec, number: int) -> SourceSpec:
    name = source.name.replace("{expert}", str(number)) if source.name else None
    return source.model_copy(update={"name": name, "parts": [_expert(part, number) for part in source.parts]})
