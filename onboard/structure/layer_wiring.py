"""How the parts of a layer are wired: every part's input, and the layer's output, solved as a sum of earlier values.

Nothing is known about the layer beforehand. Its units are the children through which the stream flows; a unit that no
block explains can be expanded into its own children.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from dayzero.onboard.oracle.calls import Call, Undiscovered, floats, same, tensors
from dayzero.onboard.oracle.reference import state_of
from dayzero.onboard.structure.chains import chain_to
from dayzero.onboard.structure.kept_inputs import equal, handed_alone, is_kept, kept_before
from dayzero.onboard.structure.several import several, top_level
from dayzero.onboard.structure.sums import solve
from dayzero.onboard.structure.token_mixing import mixes_tokens
from dayzero.onboard.structure.unit_names import named
from dayzero.onboard.structure.units import LayerParts, Unit
from dayzero.runtime.nn.loop import MESSAGE
from dayzero.runtime.nn.wiring import PAST

_Handed = dict[nn.Module, list[list[Tensor]]]  # module -> what it was handed, call by call


@dataclass(frozen=True)
class Again:
    """What is particular to a layer that runs several times. message: [B, S, n, H], what it is handed of the pass
    before, None in the first. places: child -> the arguments that it reads in other passes, and so in this one."""

    message: Tensor | None = None
    places: Mapping[str, tuple[int | str, ...]] = field(default_factory=dict)


def layer_parts(
    calls: Mapping[str, Call], layer: str, expanded: Collection[str] = (), again: Again | None = None
) -> LayerParts:
    """The wiring of the layer at the path `layer`. expanded: children to look into, because no block explains them.

    Where the children as they stand are not wired by sums, each of them with children of its own is looked into in
    turn. Only then may parts read or give several values. Raises Undiscovered.
    """
    error, hears = None, functools.cache(lambda: handed_twice(calls[layer]))
    for several_values in (False, True):
        try:
            return _wiring(calls, layer, expanded, several_values, again, hears)
        except Undiscovered as raised:
            error = raised
        for path, call in _units(calls, layer, expanded).items():
            if any(True for _ in call.module.children()):
                with contextlib.suppress(Undiscovered):
                    return _wiring(calls, layer, {*expanded, path}, several_values, again, hears)
    assert error is not None
    raise error from None


def _wiring(
    calls: Mapping[str, Call],
    layer: str,
    expanded: Collection[str],
    several_values: bool,
    again: Again | None,
    hears: Callable[[], _Handed],
) -> LayerParts:
    solver = _Solver(calls, layer, several_values, again or Again(), hears)
    for path, call in _units(calls, layer, expanded).items():
        # What is inside something wide may be wide by chance; whoever needs it says that it is not there.
        with contextlib.suppress(Undiscovered) if _is_wide(call, calls[layer]) else contextlib.nullcontext():
            solver.add(path, call)
    gives = solver.explain(calls[layer].result, f"output of {layer}")
    needed = _needed(solver.units, gives)
    if not needed:
        raise Undiscovered(f"{layer}: nothing of what it computes is made by its children")
    keeps = {"x": 1.0} if is_kept(calls, layer) else None
    return named(LayerParts(_with_outputs(needed, gives), gives, keeps))


class _Solver:
    """The units of one layer so far, the values that they gave, and the sums that were seen of them.

    several_values: whether a unit may read or give more than one. hears: `handed_twice` of the layer, where asked for.
    """

    def __init__(
        self,
        calls: Mapping[str, Call],
        layer: str,
        several_values: bool,
        again: Again,
        hears: Callable[[], _Handed],
    ):
        self.hears = hears
        self.calls, self.layer, self.call, self.several_values = calls, layer, calls[layer], several_values
        self.values, self.sums = {"x": self.call.hidden}, [{"x": 1.0}]
        self.past = kept_before(calls, layer)
        self.alone = handed_alone(calls, layer) if self.past is None else {}
        if again.message is not None:
            self.alone |= {f"{MESSAGE}.{number}": held for number, held in enumerate(again.message.unbind(2))}
        self.places = again.places
        self.values |= {name.replace(".", "#"): held for name, held in self.alone.items()}
        self.units: list[Unit] = []

    def explain(self, wanted: Tensor, what: str) -> dict[str, float]:
        """The sum that makes `wanted`; scales that it needs become units, and values for what follows, as does what
        puts values side by side."""
        count = wanted.shape[-1] // self.call.result.shape[-1]
        if count > 1 and not solve(wanted, self.values):
            return self._side_by_side(wanted, count, what)
        found, scales = _explained(wanted, self.values, self.sums, self.call.module, what)
        for unit, value in scales:
            self.units.append(unit)
            self.values[unit.name] = value
        if found not in self.sums:
            self.sums.append(found)
        return found

    def _side_by_side(self, wanted: Tensor, count: int, what: str) -> dict[str, float]:
        """`wanted` as so many sums beside each other."""
        parts = [wanted] if wanted.shape[-1] % count else wanted.chunk(count, -1)
        sums = [solve(part, self.values) for part in parts]
        if not all(sums):
            raise Undiscovered(f"{what} is no sum of earlier values, nor several of them side by side")
        name = " | ".join("+".join(terms) for terms in sums).replace("#", ".")
        self.units.append(Unit(name, "", "beside", sums[0], sums[1:]))
        self.values[name] = wanted
        return {name: 1.0}

    def add(self, path: str, call: Call) -> None:
        """The unit, with all that it is handed of the stream. Raises Undiscovered for what is no sum of values."""
        where, own = f"{self.layer}.{path}", path.partition("@")[0]
        narrow = call.hidden.shape[-1] < self.call.result.shape[-1] and "." not in path
        if narrow and (chain := chain_to(self.calls, self.layer, path)) is not None:
            reads = self.explain(chain.hidden, f"input of {self.layer}.{chain.first}")
            self.units.append(Unit(path, path, "chain", reads, call=chain))
            self.values[path] = call.result
            return
        more = [] if _knows(self.call, call) else heard(call, self.hears())
        more += [held for _, held in top_level(call) if self._is_handed(held, call)]
        if more and not self.several_values:
            raise Undiscovered(f"{where} is handed more of the stream than its input")
        stream = [(place, held) for place, held in top_level(call) if self._is_stream(call, held, more)]
        if path in self.places:
            stream = [(place, held) for place, held in top_level(call) if place in self.places[path]]
        rest = [held for held in more if not any(held is one for _, one in stream)]
        after, classes = self._routing(path, call, rest)
        made = [held for held in floats(call.output) if held.numel() == self.call.result.numel()]
        if len(stream) < 2:
            unit = Unit(path, own, _role(call), self.explain(call.hidden, f"input of {where}"))
        else:
            inputs = [terms for place, held in stream for terms in self._inputs(held, f"input {place} of {where}")]
            whole = several(call, [place for place, _ in stream])
            unit = Unit(path, own, "mixer" if mixes_tokens(whole) else "join", inputs[0], inputs[1:], call=whole)
        self.units.append(replace(unit, after=after, classes=classes, outputs=len(made)))
        self.values[path] = call.result
        if self.several_values:
            self.values |= {f"{path}#{number}": held for number, held in enumerate(made) if number}

    def _is_handed(self, held: Tensor, call: Call) -> bool:
        """Whether an argument is a value that the layer is handed beside the stream: messages are cut from a stack."""
        return any(
            held is one or (name.startswith(MESSAGE) and held is not call.hidden and equal(held, one))
            for name, one in self.alone.items()
        )

    def _is_stream(self, call: Call, held: Tensor, more: list[Tensor]) -> bool:
        """Whether an argument is one that the unit reads: its hidden input, others that depend on it, and stacks."""
        shape = self.call.hidden.shape
        if self.past is not None and held.ndim == 4:
            return held.shape[:2] == shape[:2] and held.shape[3] == shape[2]
        if held is call.hidden:
            return held.shape[:-1] in {shape[:-1], (shape[:-1].numel(),)}
        return held.shape == shape and any(held is one for one in more)

    def _inputs(self, held: Tensor, what: str) -> list[dict[str, float]]:
        if held.ndim < 4:
            return [self.explain(held, what)]
        count = 0 if self.past is None else self.past.shape[2]
        if held.shape[2] < count or not torch.equal(held[:, :, :count], self.past):  # type: ignore[arg-type]
            raise Undiscovered(f"{what} does not begin with what earlier layers kept")
        return [{PAST: 1.0}, *(self.explain(one, what) for one in held[:, :, count:].unbind(2))]

    def _routing(self, path: str, call: Call, rest: list[Tensor]) -> tuple[tuple[str, ...], int]:
        """What is left of the arguments must be what a router chose, as its output has it; the router becomes a unit.

        Returns its name."""
        if not rest:
            return (), 0
        for name, router in self.calls.items():
            given = tensors(router.output)
            inside = name.startswith(self.layer + ".") and router.has_stream
            if inside and all(any(equal(held, one) for one in given) for held in rest):
                stacked = [held.shape[0] for held in call.module.parameters() if held.ndim == 3]
                if not stacked:
                    break
                own = name.removeprefix(self.layer + ".")
                if not any(unit.name == own for unit in self.units):
                    reads = self.explain(router.hidden, f"input of {name}")
                    self.units.append(Unit(own, own, "routing", reads, classes=stacked[0]))
                return (own,), 0
        raise Undiscovered(f"{self.layer}.{path} is handed more of the stream than its input")


def _with_outputs(units: list[Unit], gives: dict[str, float]) -> list[Unit]:
    """Units whose further outputs are read have them; the others have one."""
    every = [*(terms for unit in units for terms in unit.inputs), gives]
    used = {name.partition("#")[0] for terms in every for name in terms if "#" in name}
    for terms in every:
        for name in [name for name in terms if name in used]:
            order = [(f"{old}#0" if old == name else old, factor) for old, factor in terms.items()]
            terms.clear()
            terms.update(order)
    made = []
    for unit in units:
        if unit.name in used and unit.role != "scale":
            places = getattr(unit.call, "places", None)
            joined = several(unit.call, places, joined=True) if unit.call is not None and places else unit.call
            made.append(replace(unit, call=joined))
        else:
            made.append(replace(unit, outputs=1))
    return made


def _units(calls: Mapping[str, Call], layer: str, expanded: Collection[str]) -> dict[str, Call]:
    """Children through which the stream flows, by path relative to the layer, but for those that change nothing."""
    size, lists = calls[layer].result.numel(), _lists(calls[layer].module)
    units = {}
    for path, call in calls.items():
        if not path.startswith(layer + ".") or not call.has_stream:
            continue
        relative = path.removeprefix(layer + ".")
        parents = {relative[:dot] for dot in range(len(relative)) if relative[dot] == "."}
        if relative in expanded or not all(p in expanded or p in lists for p in parents):
            continue
        whole = call.result.numel() == size or _is_wide(call, calls[layer])
        if whole and not (call.hidden.numel() == call.result.numel() and same(call.hidden, call.result)):
            units[relative] = call
    return units


def _is_wide(call: Call, layer: Call) -> bool:
    """Whether it gives what several values side by side would be, and reads the like: a norm of two of them."""
    width, shape = layer.result.shape[-1], call.result.shape
    wide = shape[:-1] == layer.result.shape[:-1] and shape[-1] > width and not shape[-1] % width
    return wide and call.hidden.shape == shape


def heard(call: Call, seen: _Handed) -> list[Tensor]:
    """The arguments of the call beside its hidden input that depend on the layer's input: with any, the module is no
    function of its hidden input, however well it is reproduced with these held fixed.

    seen: as `handed_twice` gives it for the layer.
    """
    mine = tensors((call.args, call.kwargs))
    twice = seen[call.module]
    if len(twice) != 2 or not len(twice[0]) == len(twice[1]) == len(mine):
        return [held for held in mine if held is not call.hidden]
    position = next((i for i, t in enumerate(twice[0]) if same(t, call.hidden)), -1)
    differ = [i for i, (a, b) in enumerate(itertools.zip_longest(*twice)) if i != position and not equal(a, b)]
    return [mine[i] for i in differ]


def _knows(layer: Call, call: Call) -> bool:
    """Whether all that the call is handed beside its hidden input is what the layer was handed beside its own."""
    known = [held for held in tensors((layer.args, layer.kwargs)) if held is not layer.hidden]
    others = [held for held in tensors((call.args, call.kwargs)) if held is not call.hidden]
    return all(any(other is held for held in known) for other in others)


def handed_twice(layer: Call) -> _Handed:
    """What every module inside the layer is handed, in a pass on the layer's input and in one on another input."""
    seen: _Handed = {module: [] for module in layer.module.modules()}

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        seen[module].append(tensors((args, kwargs)))

    handles = [module.register_forward_pre_hook(note, with_kwargs=True) for module in seen]
    try:
        with torch.no_grad():
            layer.replay(layer.hidden)
            moved = layer.hidden + 0.1 * torch.cos(torch.arange(layer.hidden.numel())).reshape(layer.hidden.shape)
            layer.replay(moved)
    finally:
        for handle in handles:
            handle.remove()
    return seen


def _lists(layer: nn.Module) -> set[str]:
    """Plain lists of modules inside the layer: they are no units, their members may be."""
    return {path for path, module in layer.named_modules() if isinstance(module, (nn.ModuleList, nn.ModuleDict))}


def _role(call: Call) -> str:
    if isinstance(call.module, nn.Linear):
        return "projection"
    if call.source is not None and not mixes_tokens(call):
        return "cross"
    if all(parameter.ndim <= 1 for parameter in call.module.parameters()) and not mixes_tokens(call):
        return "norm"
    return "mixer" if mixes_tokens(call) else "ffn"


def _explained(
    wanted: Tensor, values: Mapping[str, Tensor], sums: list[dict[str, float]], layer: nn.Module, what: str
) -> tuple[dict[str, float], list[tuple[Unit, Tensor]]]:
    """`wanted` as a sum of values; also of values and earlier sums multiplied by vectors that the layer itself owns,
    which become units of their own. Raises Undiscovered."""
    if found := solve(wanted, values):
        return _with_owned_factors(found, values, layer, wanted.shape)
    scaled: dict[str, tuple[Unit, Tensor]] = {}
    bases = [{name: 1.0} for name in values] + [terms for terms in sums if len(terms) > 1]
    for name, vector in (*layer.named_parameters(recurse=False), *layer.named_buffers(recurse=False)):
        if not vector.is_floating_point() or vector.numel() not in {1, wanted.shape[-1]}:
            continue
        for terms in bases:
            if all(values[term].numel() == wanted.numel() for term in terms):
                unit = Unit(f"{name}@{'+'.join(terms)}", name, "scale", terms)
                base = sum(values[term].reshape(wanted.shape) * factor for term, factor in terms.items())
                scaled[unit.name] = unit, base * vector.detach()
    # One scale at a time first, of the longest sum: scales of a sum and of its terms are not independent.
    alone = sorted(scaled, key=lambda name: -len(scaled[name][0].reads))
    for names in (*([name] for name in alone), alone):
        if found := solve(wanted, {**values, **{name: scaled[name][1] for name in names}}):
            return found, [scaled[name] for name in found if name in scaled]
    raise Undiscovered(f"{what} is no sum of earlier values ({', '.join(values)})")


def _with_owned_factors(
    found: dict[str, float], values: Mapping[str, Tensor], layer: nn.Module, shape: torch.Size
) -> tuple[dict[str, float], list[tuple[Unit, Tensor]]]:
    """The same sum, its terms whose factor is a stored number of the layer as one unit that multiplies their sum."""
    scales: list[tuple[Unit, Tensor]] = []
    for name, held in state_of(layer).items():
        factor = float(held) if held.shape == (1,) and "." not in name and held.is_floating_point() else 1.0
        terms = {term: 1.0 for term, own in found.items() if factor != 1.0 and abs(own - factor) <= 1e-10 * abs(factor)}
        if terms:
            unit = Unit(f"{name}@{'+'.join(terms)}", name, "scale", terms)
            total = sum(values[term].reshape(shape) for term in terms)
            scales.append((unit, total * held))
            found = {term: own for term, own in found.items() if term not in terms} | {unit.name: 1.0}
    return found, scales


def _needed(units: list[Unit], gives: Mapping[str, float]) -> list[Unit]:
    """The units that the output depends on, in order."""
    wanted, kept = {name.partition("#")[0] for name in gives}, []
    for unit in reversed(units):
        if unit.name in wanted:
            kept.append(unit)
            wanted |= {name.partition("#")[0] for terms in unit.inputs for name in terms} | set(unit.after)
    return kept[::-1]
