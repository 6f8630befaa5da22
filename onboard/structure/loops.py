"""Layers that run several times: which, how often, and what one pass over them is handed of the one before.

A module of the list that is called again is one that runs again. Either a pass goes on with what the one before gave,
or it begins where the first began and is handed something that a module made of what the one before kept and gave.
"""

import contextlib
import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates import Evidence
from dayzero.onboard.oracle.calls import Call, Undiscovered, floats, same
from dayzero.onboard.oracle.reference import run, text_config
from dayzero.onboard.structure.kept_inputs import equal
from dayzero.onboard.structure.several import SeveralCall, top_level


@dataclass(frozen=True)
class LoopParts:
    """Layers first .. first + count - 1 run `passes` times. restarts: every pass begins where the first did. message:
    path of the module that makes what the layers of a later pass are handed, and `place`, the argument that says for
    which of them."""

    first: int
    count: int
    passes: int
    restarts: bool
    message: str | None = None
    place: int | str | None = None

    @property
    def layers(self) -> range:
        return range(self.first, self.first + self.count)


def passes_on(one: Call, two: Call) -> bool:
    """Whether the second is handed what the first gives, be it in one of its later runs."""
    given = [made.result for made in visits(one)]
    return any(same(tensor, made) for tensor in floats((two.args, two.kwargs)) for made in given)


def visits(call: Call) -> list[Call]:
    """All calls of the module, in order."""
    return [call, *call.later]


def loop_of(calls: Mapping[str, Call], layers: str, count: int) -> LoopParts | None:
    """What of the list at `layers` runs several times; None where each runs once. Raises Undiscovered."""
    times = [len(visits(calls[f"{layers}.{index}"])) for index in range(count)]
    looped = [index for index, number in enumerate(times) if number > 1]
    if not looped:
        return None
    first, passes = looped[0], times[looped[0]]
    if looped != list(range(first, first + len(looped))) or any(times[index] != passes for index in looped):
        raise Undiscovered(f"layers run {times} times; expected some in a row that all run equally often")
    begins = visits(calls[f"{layers}.{first}"])
    ends = visits(calls[f"{layers}.{looped[-1]}"])
    restarts = all(same(call.hidden, begins[0].hidden) for call in begins)
    if not restarts and not all(same(begin.hidden, end.result) for end, begin in zip(ends, begins[1:], strict=False)):
        raise Undiscovered(f"layers {first}-{looped[-1]} run again neither from where they began nor where they ended")
    found = LoopParts(first, len(looped), passes, restarts)
    return replace(found, **_message(calls, layers, found))


def _message(calls: Mapping[str, Call], layers: str, loop: LoopParts) -> dict[str, Any]:
    """The module, outside the layers, whose results the layers of the second pass are handed."""
    seconds = [visits(calls[f"{layers}.{index}"])[1] for index in loop.layers]
    for path, call in calls.items():
        made = visits(call)
        if path.startswith(layers) or not call.has_stream or len(made) != loop.count * (loop.passes - 1):
            continue
        if all(handed_message(second, one.result) is not None for second, one in zip(seconds, made, strict=False)):
            for place in (*range(len(call.args)), *call.kwargs):
                numbers = [_argument(one, place) for one in made[: loop.count]]
                if all(type(number) is int for number in numbers) and numbers == list(range(loop.count)):
                    return {"message": path, "place": place}
            raise Undiscovered(f"{path} is not told for which of the {loop.count} layers that run again it works")
    return {}


def _argument(call: Call, place: int | str) -> Any:
    return call.args[place] if isinstance(place, int) else call.kwargs.get(place)


def handed_message(layer: Call, made: Tensor) -> Tensor | None:
    """[B, S, n, H]: the argument of the layer that is what another module made."""
    return next((held for _, held in top_level(layer) if held.ndim == 4 and equal(held, made)), None)


def message_of(calls: Mapping[str, Call], loop: LoopParts, layer: int) -> Tensor | None:
    """[B, S, n, H]: what the layer is handed in the last pass of the one before it; None for nothing."""
    if loop.message is None:
        return None
    return visits(calls[loop.message])[(loop.passes - 2) * loop.count + layer - loop.first].result


def in_pass(calls: Mapping[str, Call], layers: str, loop: LoopParts, number: int) -> dict[str, Call]:
    """The calls with those of the layers that run again as they are in pass `number`, -1 for the last. A
    module that runs more than once within the pass stands under its path, then under "path@2" and so on."""
    number %= loop.passes
    inside = tuple(f"{layers}.{index}." for index in loop.layers)
    made: dict[str, Call] = {path: call for path, call in calls.items() if not f"{path}.".startswith(inside)}
    for layer in (f"{layers}.{index}" for index in loop.layers):
        made |= inside_visit(calls, layer, number)
        made[layer] = visits(calls[layer])[number]
    return made


def inside_visit(calls: Mapping[str, Call], layer: str, number: int) -> dict[str, Call]:
    """The calls inside a layer in one of its runs, named as above."""
    runs = visits(calls[layer])
    before = runs[number - 1].order if number else -1
    held = (one for path, call in calls.items() if path.startswith(f"{layer}.") for one in visits(call))
    inside = [one for one in held if before < one.order < runs[number].order]
    return by_use(sorted(inside, key=lambda call: call.order))


@dataclass
class EachLayerCall(SeveralCall):
    """The module that makes messages, for `count` layers: its results for each of them, one after the other."""

    place: int | str = 0
    count: int = 1

    def replay_exactly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        results = []
        for number in range(self.count):
            own = [number if place == self.place else value for place, value in enumerate(args)]
            named = {name: number if name == self.place else value for name, value in kwargs.items()}
            results.append(floats(super().replay_exactly(tuple(own), named))[0])
        return torch.cat([result.flatten(2) for result in results], -1)


def message_call(calls: Mapping[str, Call], loop: LoopParts) -> EachLayerCall:
    """The module as a function of what the pass before kept and gave. Where that kept nothing, it is asked about more:
    of one state alone every mixture is the same."""
    assert loop.message is not None
    assert loop.place is not None
    call = calls[loop.message]
    args, kwargs = list(call.args), dict(call.kwargs)
    generator = torch.Generator().manual_seed(0)
    for place, held in top_level(call):
        if held.ndim == 4 and held.shape[2] < 2:
            size = (*held.shape[:2], 3, held.shape[3])
            more = torch.randn(size, generator=generator, dtype=torch.float64)
            if isinstance(place, int):
                args[place] = more
            else:
                kwargs[place] = more
    places = tuple(place for place, _ in top_level(call))
    held = EachLayerCall(call.path, call.module, tuple(args), kwargs, None, places=places, place=loop.place)
    with torch.no_grad(), contextlib.suppress(IndexError):
        for held.count in itertools.count(1):  # it may be able to work for more layers than there are
            held.output = held.replay_exactly(held.args, held.kwargs)
    held.count -= 1
    return held


def with_other_messages(calls: Mapping[str, Call], layer: str, message: Tensor) -> tuple[dict[str, Call], Tensor]:
    """The calls with those of a layer as it runs where all that it is handed of the pass before differs, and that:
    what a pass kept may be so little that all messages are the same, and one could be read for another."""
    call = calls[layer]
    other = torch.randn(message.shape, generator=torch.Generator().manual_seed(0), dtype=message.dtype)

    def changed(value: Any) -> Any:
        return other if isinstance(value, Tensor) and value.ndim == 4 and equal(value, message) else value

    args, kwargs = call.arguments(changed)
    seen, output = record_inside(call, args, kwargs)
    made = {path: held for path, held in calls.items() if not f"{path}.".startswith(f"{layer}.")}
    made |= by_use(seen)
    made[layer] = replace(call, args=args, kwargs=kwargs, output=output, later=[])
    return made, other


def record_inside(call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[list[Call], Any]:
    """The calls of all modules inside this one, in order, where it is called with other arguments; and its output."""
    seen: list[Call] = []
    handles = []
    for name, module in call.module.named_modules():
        if not name:
            continue

        def note(module, given, named, output, path=f"{call.path}.{name}"):
            seen.append(Call(path, module, given, named, output, order=len(seen)))

        handles.append(module.register_forward_hook(note, with_kwargs=True))
    try:
        with torch.no_grad():
            output = call.replay_exactly(args, kwargs)
    finally:
        for handle in handles:
            handle.remove()
    return seen, output


def by_use(calls: Iterable[Call]) -> dict[str, Call]:
    """By path, and a module that runs more than once also under "path@2" and so on."""
    made: dict[str, Call] = {}
    for call in calls:
        names = itertools.chain([call.path], (f"{call.path}@{use}" for use in itertools.count(2)))
        made[next(name for name in names if name not in made)] = call
    return made


def passes_evidence(reference: nn.Module, ids: Tensor, layers: str, loop: LoopParts) -> Evidence:
    """The field of the text config that says how often: the one that, raised by one, has the layers run once more."""
    fields = [
        name
        for name, value in text_config(reference).to_dict().items()
        if type(value) is int and value == loop.passes and hasattr(text_config(reference), name)
    ]
    for name in fields:
        if any(count == loop.passes + 1 for count in _runs_with(reference, name, ids, f"{layers}.{loop.first}")):
            return Evidence(name, lambda module, config, name=name: getattr(config, name))
    raise Undiscovered(f"no field of the config says that layers {loop.first}.. run {loop.passes} times")


def _runs_with(reference: nn.Module, field: str, ids: Tensor, path: str) -> Iterator[int]:
    """How often the module at `path` runs where a field is one more; nothing where there is no such model."""
    config: Any = copy.deepcopy(reference.config)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    runs = 0

    def count(*_: Any) -> None:
        nonlocal runs
        runs += 1

    try:
        setattr(text, field, getattr(text, field) + 1)
        other = type(reference)(config).to(torch.float64).eval()  # type: ignore[call-arg]
        handle = other.get_submodule(path).register_forward_hook(count)
        with torch.no_grad():
            run(other, ids)
        handle.remove()
    except Exception:  # whatever a model makes of sizes that are not its own
        return
    yield runs
