"""What a model hands to its layers beside the stream, and what they leave for one another: each proven, or compared
with what the reference's modules are handed, by itself."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.align.divergence import first_in_layer
from dayzero.onboard.align.places import Place
from dayzero.onboard.align.watched import watched_while
from dayzero.onboard.candidates.evidence import Site, site_of
from dayzero.onboard.oracle.calls import Call, floats, same
from dayzero.onboard.oracle.reference import state_of
from dayzero.onboard.prove.block import block_function, relative_error
from dayzero.onboard.structure.chains import ChainCall
from dayzero.onboard.structure.handed import query_scale
from dayzero.onboard.structure.kept_inputs import kept_before
from dayzero.onboard.structure.layer_inputs import handed_to_layers
from dayzero.onboard.structure.left import as_shared, left_behind
from dayzero.onboard.structure.loops import LoopParts, in_pass, message_of, with_other_messages
from dayzero.runtime.nn import Context
from dayzero.runtime.nn.context import Shared
from dayzero.runtime.nn.latent_attention import SELECTED
from dayzero.runtime.nn.layer_inputs import LAYER_INPUT
from dayzero.runtime.spec import ModelSpec

_BY_THE_MODEL = {"query_scale", LAYER_INPUT}  # handed to all layers, left by none


@dataclass
class LayerInputsCall(Call):
    """The module that holds the layers, as a function of the embeddings [B, S, H] that the first one reads: what it
    hands to each layer beside them, [B, S, layers, P]. layers: path of the list; calls: of the whole pass; ids: [B, S].
    """

    layers: str = ""
    calls: Mapping[str, Call] | None = None
    ids: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        assert self.calls is not None
        return self.calls[f"{self.layers}.0"].hidden

    @property
    def result(self) -> Tensor:
        return self.output

    def split(self, hidden: Tensor) -> list[Tensor]:
        assert self.ids is not None
        return [hidden.flatten(0, 1), self.ids.flatten()]

    def replay(self, hidden: Tensor) -> Tensor:
        """Every module outside the layers that read the embeddings is given `hidden` in their place; the layers do not
        run."""
        assert self.calls is not None
        seen: dict[str, Call] = {}
        outside = {p: call for p, call in self.calls.items() if not f"{p}.".startswith(f"{self.layers}.")}
        readers = [call.module for call in outside.values() if call.has_stream and same(call.hidden, self.hidden)]
        members = [call for path, call in self.calls.items() if path.rpartition(".")[0] == self.layers]

        def swap(module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
            read = floats((args, kwargs))[0]
            swapped = {name: hidden if value is read else value for name, value in kwargs.items()}
            return tuple(hidden if value is read else value for value in args), swapped

        def instead(call: Call) -> Any:
            def forward(*args: Any, **kwargs: Any) -> Any:
                seen[call.path] = Call(call.path, call.module, args, kwargs, call.output)
                return call.output

            return forward

        handles = [module.register_forward_pre_hook(swap, with_kwargs=True) for module in readers]
        for call in members:
            call.module.forward = instead(call)
        try:
            self.replay_exactly(self.args, self.kwargs)
        finally:
            for handle in handles:
                handle.remove()
            for call in members:
                del call.module.forward
        made = handed_to_layers(seen, self.layers)
        if made is None:
            raise ValueError(f"{self.path} hands its layers nothing beside the stream")
        return made


def layer_inputs_call(calls: Mapping[str, Call], path: str, layers: str, ids: Tensor) -> Call | None:
    """The module at `path` as what makes the inputs of its layers; None where it hands them nothing."""
    made = handed_to_layers(calls, layers) if path in calls and f"{layers}.0" in calls else None
    if made is None:
        return None
    whole = calls[path]
    return LayerInputsCall(path, whole.module, whole.args, whole.kwargs, made, layers=layers, calls=calls, ids=ids)


def on_other_messages(
    spec: ModelSpec,
    ours: Any,
    calls: Mapping[str, Call],
    loop: LoopParts,
    layers: str,
    context: Callable[[Site], Context],
) -> Iterator[tuple[str, float]]:
    """Of each layer that runs several times whether in the last pass it does what the reference's does where all that
    both are handed of the pass before differs: of little that was kept, messages are all the same, and one could stand
    for another. context: of our layer, from its site."""
    last = in_pass(calls, layers, loop, -1)
    for index in loop.layers:
        path = f"{layers}.{index}"
        message = message_of(calls, loop, index)
        if message is None:
            continue
        changed, other = with_other_messages(last, path, message)
        kept = kept_before(changed, path)
        past = [] if kept is None else kept.flatten(0, 1).unbind(1)
        stream = changed[path].hidden.flatten(0, 1)
        seen = context(site_of(changed, path, None))
        seen = replace(seen, message=other.flatten(0, 1).unbind(1))
        layer = ours.layers[index]
        made = watched_while(ours, lambda: layer((*past, stream) if spec.history else stream, seen))  # noqa: B023
        first = first_in_layer(spec, index, loop.passes - 1, made, changed)
        name = f"layers.{index} in pass {loop.passes}, for {path}, handed other messages"
        yield (first, float("inf")) if first else (name, 0.0)


def without_held(objection: str, call: LayerInputsCall) -> str:
    """An objection without constants of ours that the reference holds as tensors, which its trace does not show."""
    held = [float(one) for one in (*call.module.buffers(), *call.module.parameters()) if one.numel() == 1]

    def explained(line: str) -> bool:
        constant = line.removeprefix("block only: constant ")
        return constant != line and any(abs(float(constant) - one) <= 1e-12 * abs(one) for one in held)

    return "; ".join(line for line in objection.split("; ") if not explained(line))


def owned_scale(place: Place, reference: nn.Module) -> float:
    """How far a part that multiplies by a vector of the layer's own is from that: infinity where there is none."""
    owner, _, name = place.path.rpartition(".")
    vector = state_of(reference.get_submodule(owner)).get(name)
    x = torch.randn(3, 1 if vector is None else vector.numel(), dtype=torch.float64)
    return float("inf") if vector is None else relative_error(place.module(x), x * vector)


def scale_error(handed: Iterable[Call], mine: Tensor) -> float:
    """The largest distance between the factors by position that calls are handed and ours [T]; infinity where one is
    handed none."""
    found = [query_scale(call) for call in handed]
    return max((float("inf") if one is None else relative_error(mine, one) for one in found), default=0.0)


def _distance(left: Tensor, handed: Tensor) -> float:
    """A relative error; of whole numbers, such as places of keys, 0 where each row has the same ones, else infinity."""
    if handed.is_floating_point():
        return relative_error(left, handed)
    same_ones = left.shape == handed.shape and torch.equal(left.sort(-1).values, handed.sort(-1).values)
    return 0.0 if same_ones else float("inf")


class _Noted(Shared):
    """What layers leave for one another, and which of it was taken."""

    def __init__(self, held: Mapping[str, Tensor]):
        self.taken: set[str] = set()
        super().__init__(held)

    def __getitem__(self, name: str) -> Tensor:
        held = super().__getitem__(name)
        self.taken.add(name)
        return held


def left_for_later(found: Iterable[tuple[Place, Site]]) -> Iterator[tuple[str, float]]:
    """How far what each block leaves is from what the next one that takes it is handed in the reference; infinity for
    what is taken and nobody left. found: every block in the order in which they run, and its module.

    Each block is given what its module is, so that an error of one is no error of the next."""
    left: dict[str, tuple[Place, Tensor]] = {}
    owed: dict[str, Place] = {}  # whose module leaves it in the reference
    for place, site in found:
        context = site.context
        before = dict(context.shared)
        context = replace(context, shared=_Noted(before))
        if not getattr(place.module, "uses_context", False):
            continue
        try:
            with torch.no_grad():
                block_function(site, place.module, context=context)(site.call.hidden)
        except (RuntimeError, ValueError, IndexError, KeyError):
            continue  # proving it says so
        copied = any(block.block == "Lifted" for block in place.spec.walk())  # is handed all there is
        for name in sorted(set() if copied else context.shared.taken - _BY_THE_MODEL):  # type: ignore[attr-defined]
            if name in before and name in left:
                maker, value = left[name]
                handed = before[name]
                if name == SELECTED:  # keys that come later are not seen, whatever stands there
                    handed = handed.masked_fill(handed > context.position[:, None, None], -1)
                yield f"{maker.both}: {name!r}, left for {place.name}", _distance(value, handed)
            elif name in before:
                yield f"{owed.get(name, place).both}: {name!r} is not left for {place.name}", float("inf")
        if isinstance(site.call, ChainCall):  # it is handed what its layer is, and left what the layer leaves
            continue
        owed |= {n: place for name, pair in left_behind(site.call).items() for n in as_shared(name, pair)}
        left |= {n: (place, held) for n, held in context.shared.items() if before.get(n) is not held}
