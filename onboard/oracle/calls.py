"""The calls of a reference's modules as they were: arguments, outputs, and each module again as a pure function."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from dayzero.onboard.oracle.reference import Promote, encoder_path, logits_of


class Undiscovered(Exception):
    """The reference has a shape that no rule here explains. The message says which part and what was seen."""


@dataclass
class Call:
    """One call of a module: its arguments and its output, as they were. later: its further calls in the same pass.
    joined: the result is all outputs side by side, for a module whose outputs all matter. source: what the encoder
    gave, where the call of a decoder is handed it. order: of completion, among all calls of the pass."""

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    later: list["Call"] = field(default_factory=list, repr=False)
    joined: bool = False
    source: Tensor | None = field(default=None, repr=False)
    order: int = 0

    @property
    def has_stream(self) -> bool:
        """Whether floating-point tensors go in and come out."""
        return bool(floats((self.args, self.kwargs)) and floats(self.output))

    @property
    def hidden(self) -> Tensor:
        """The first floating-point tensor among the arguments."""
        return floats((self.args, self.kwargs))[0]

    @property
    def result(self) -> Tensor:
        """The first floating-point tensor of the output, or all of them joined."""
        return self._result(self.output)

    def _result(self, output: Any) -> Tensor:
        return join(floats(output), 2) if self.joined else floats(output)[0]

    def replay(self, hidden: Tensor) -> Tensor:
        """The module as a pure function of its hidden input; every other argument as captured."""
        replaced = False

        def swap(value: Any) -> Any:
            nonlocal replaced
            if not replaced and isinstance(value, Tensor) and value.is_floating_point():
                replaced = True
                return hidden
            return value

        return self._result(self.replay_exactly(*self.arguments(swap)))

    def arguments(self, change: Callable[[Any], Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments, each as `change` makes it, in order: what `replay_exactly` is called with."""
        return tuple(map(change, self.args)), {name: change(value) for name, value in self.kwargs.items()}

    @property
    def inputs(self) -> list[Tensor]:
        """The arguments that `hidden` is made of."""
        return [self.hidden]

    def split(self, hidden: Tensor) -> list[Tensor]:
        """What a block is given where the module is given `hidden`: [T, H], or [T, n, H] of several streams."""
        return [hidden.flatten(0, 1) if hidden.ndim == 4 else hidden.reshape(-1, hidden.shape[-1])]

    def replay_exactly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The module called again with other arguments, float32 islands promoted. What it writes into mappings is
        lost."""
        with Promote():
            return self.module(*map(_own, args), **{name: _own(value) for name, value in kwargs.items()})


def _own(value: Any) -> Any:
    """A mapping in which layers leave things for one another as it is now; anything else itself."""
    return copy.copy(value) if isinstance(value, Mapping) else value


def floats(value: Any) -> list[Tensor]:
    """Every floating-point tensor inside nested tuples, lists and dicts, in order."""
    if isinstance(value, Tensor):
        return [value] if value.is_floating_point() else []
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in floats(item)]
    return []


def join(parts: Iterable[Tensor], leading: int) -> Tensor:
    """Tensors side by side, the smaller first; all but their `leading` dimensions are flattened into one."""
    flat = [part.reshape(*part.shape[:leading], -1) for part in parts]
    return torch.cat(sorted(flat, key=lambda part: part.numel()), -1)


def tensors(value: Any) -> list[Tensor]:
    """Every tensor inside nested tuples, lists and dicts."""
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, (tuple, list)):
        return [tensor for item in value for tensor in tensors(item)]
    return []


def record_calls(model: nn.Module, ids: Tensor) -> tuple[dict[str, Call], Tensor]:
    """Runs the model once; the first call of every module by path, in order of completion, and the logits.

    What code changes in place afterwards is given back as it was at the call, and so are mappings that it writes to.
    Raises Undiscovered for a model that cannot run.
    """
    calls: dict[str, Call] = {}
    # Of the calls that are not over, by module: their arguments, and the mappings among these as they were.
    before: dict[int, list[_Snapshot]] = {}
    mappings: dict[int, dict[int, Any]] = {}
    snapshots: list[tuple[Call, list[_Snapshot]]] = []
    handles = []
    for path, module in model.named_modules():

        def enter(module, args, kwargs):
            before[id(module)] = _snapshots((args, kwargs))
            every = [*args, *kwargs.values()]
            mappings[id(module)] = {id(value): _own(value) for value in every if isinstance(value, Mapping)}

        def leave(module, args, kwargs, output, path=path):
            as_before = mappings.pop(id(module), {})
            args = tuple(as_before.get(id(value), value) for value in args)
            kwargs = {name: as_before.get(id(value), value) for name, value in kwargs.items()}
            call = Call(path, module, args, kwargs, output, order=len(snapshots))
            snapshots.append((call, [*before.pop(id(module), []), *_snapshots(output)]))
            if path in calls:
                calls[path].later.append(call)
            else:
                calls[path] = call

        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        with torch.no_grad(), Promote():
            logits = logits_of(model, ids)
    except (RuntimeError, TypeError, ValueError, AttributeError, IndexError, KeyError) as error:
        found = " ".join(str(error).split())[:200]
        raise Undiscovered(f"the reference does not run at small sizes ({type(error).__name__}: {found})") from None
    finally:
        for handle in handles:
            handle.remove()
    for call, held in snapshots:
        changed = {id(kept.tensor): kept.copy for kept in held if kept.tensor._version != kept.version}
        if changed:
            call.args, call.kwargs, call.output = _replaced((call.args, call.kwargs, call.output), changed)
    if (encoder := encoder_path(model)) is not None:
        _note_source(calls, encoder)
    return calls, logits


def _note_source(calls: Mapping[str, Call], encoder: str) -> None:
    """What the encoder gives is the source of every call outside it that is handed it."""
    states = floats(calls[encoder].output)
    for path, call in calls.items():
        inside = f"{path}.".startswith(f"{encoder}.")
        if not inside and any(held is one for held in tensors((call.args, call.kwargs)) for one in states[:1]):
            call.source = states[0]


class _Snapshot(NamedTuple):
    """A tensor as it was: torch counts the changes in place of it and of its views in `_version`."""

    tensor: Tensor
    version: int
    copy: Tensor


def _snapshots(value: Any) -> list[_Snapshot]:
    return [_Snapshot(tensor, tensor._version, tensor.clone()) for tensor in tensors(value)]


def _replaced(value: Any, copies: Mapping[int, Tensor]) -> Any:
    """Nested tuples, lists and dicts with some of their tensors replaced; what holds none of these stays itself."""
    if isinstance(value, Tensor):
        return copies.get(id(value), value)
    if isinstance(value, dict):
        return {name: _replaced(held, copies) for name, held in value.items()}
    if type(value) in {tuple, list}:
        return type(value)(_replaced(held, copies) for held in value)
    return value


def same(a: Tensor, b: Tensor) -> bool:
    """Equal values, whatever the leading dimensions."""
    if a is b:
        return True
    return a.numel() == b.numel() and a.shape[-1:] == b.shape[-1:] and torch.equal(a.reshape(b.shape), b)
