"""What a layer does between its parts is the sum that was solved, and nothing else.

The sum was solved from the values of one input. Here the layer runs again on other inputs, with the output of every
part cut off from what made it: what remains is what the layer itself does. Its values and gradients must be those of
the sum, and its operations may only add and multiply.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from dayzero.onboard.candidates.factor import find_factor
from dayzero.onboard.oracle.calls import Call, floats
from dayzero.onboard.prove.trace import Step, trace
from dayzero.onboard.structure.kept_inputs import handed_alone
from dayzero.onboard.structure.units import LayerParts, Unit

_EXACT = 1e-9  # relative
_SCALES = (1.0, 30.0)
_SUMS = {"add", "mul", "div", "matmul"}


def objection(
    calls: Mapping[str, Call], layer: str, wiring: LayerParts, config: Any, generator: torch.Generator
) -> str:
    """What the layer does beside the sums of its wiring; "" for nothing."""
    alone = handed_alone(calls, layer)
    return _of_operations(calls, layer, wiring, config) or _of_values(calls[layer], wiring, alone, generator)


def _of_operations(calls: Mapping[str, Call], layer: str, wiring: LayerParts, config: Any) -> str:
    """Arithmetic that is in no part and no sum, or a factor of a sum that nothing gives."""
    left = Counter(_steps(calls[layer]))
    for path in {f"{layer}.{unit.path}" for unit in wiring.units if unit.is_module}:
        for call in (calls[path], *calls[path].later):
            left -= Counter(_steps(call))
    if steps := sorted({name for step in left for name in step.arithmetic} - _SUMS):
        return f"computes {', '.join(steps)} between its parts"
    sums = [*(terms for unit in wiring.units for terms in unit.inputs), wiring.gives]
    factors = {abs(factor) for terms in sums for factor in terms.values()}
    known = [*factors, *(1 / factor for factor in factors), 0.0]
    numbers = {abs(number) for step in left if step.arithmetic & {"add", "mul", "div"} for number in step.numbers}
    if unknown := sorted(number for number in numbers if not any(_close(number, one) for one in known)):
        return f"computes with {unknown[0]!r} between its parts, which is no factor of what it adds"
    written = [*numbers, *(1 / number for number in numbers if number)]
    for factor in sorted(factors):
        given = find_factor(factor, calls[layer].module, config) is not None
        if not given and not any(_close(factor, number) for number in written):
            return f"adds {factor!r} times a value, a factor that no constant, attribute or field gives"
    return ""


def _steps(call: Call) -> list[Step]:
    return trace(lambda: call.replay(call.hidden)).sequence


def _close(value: float, other: float) -> bool:
    return abs(value - other) <= 1e-10 * max(value, other)


def _of_values(call: Call, wiring: LayerParts, alone: Mapping[str, Tensor], generator: torch.Generator) -> str:
    """A value or gradient of the layer's own that is not that of its sums. alone: what was kept that it is handed."""
    units = {unit.path: unit for unit in wiring.units if unit.is_module}
    for scale in _SCALES:
        hidden = torch.randn(call.hidden.shape, generator=generator, dtype=torch.float64) * scale
        hidden.requires_grad_(True)
        kept = {
            name: torch.randn(held.shape, generator=generator, dtype=torch.float64).requires_grad_(True)
            for name, held in alone.items()
        }
        given = {id(call.hidden): hidden, **{id(held): kept[name] for name, held in alone.items()}}
        with _Cut(call, units) as cut:
            swapped = call.arguments(lambda value, given=given: given.get(id(value), value))
            result = floats(call.replay_exactly(*swapped))[0] if alone else call.replay(hidden)
        leaves = {"x": hidden, **kept, **cut.given}
        sums = _Sums(call.module, wiring, leaves, generator)
        for unit in wiring.units:
            if unit.path in cut.read and len(unit.inputs) == 1:
                if wrong := sums.differ(cut.read[unit.path], unit.reads):
                    return f"reads for {unit.path} what is not the sum of earlier values: {wrong} at input x{scale:g}"
                if wrong := sums.handed_on(cut.more[unit.path], cut.routes):
                    return f"hands {unit.path} what is not what was routed: {wrong} at input x{scale:g}"
        if wrong := sums.differ(result, wiring.gives):
            return f"gives what is not the sum of its parts: {wrong} at input x{scale:g}"
    return ""


class _Cut:
    """While it is entered, the units of a layer give leaves of autograd, and what they read and give is noted."""

    def __init__(self, call: Call, units: Mapping[str, Unit]):
        self.layer, self.units = call.module, units
        self.read: dict[str, Tensor] = {}
        self.more: dict[str, list[Tensor]] = {}
        self.given: dict[str, Tensor] = {}
        self.routes: list[Tensor] = []

    def __enter__(self) -> "_Cut":
        self.handles = []
        for path, unit in self.units.items():
            module = self.layer.get_submodule(path)
            self.handles.append(module.register_forward_pre_hook(self._before(unit), with_kwargs=True))
            self.handles.append(module.register_forward_hook(self._after(unit)))
        return self

    def __exit__(self, *error: object) -> None:
        for handle in self.handles:
            handle.remove()

    def _before(self, unit: Unit) -> Any:
        def note(module: Any, args: tuple, kwargs: dict) -> None:
            if unit.path not in self.read:
                self.read[unit.path], *self.more[unit.path] = floats((args, kwargs))

        return note

    def _after(self, unit: Unit) -> Any:
        def cut(module: Any, args: tuple, output: Any) -> Any:
            if unit.name in self.given or unit.name in {name.partition(".")[0] for name in self.given}:
                return output
            output = _leaves(output)
            made = floats(output)
            if unit.role == "routing":
                self.routes += made
            elif unit.outputs == 1:
                self.given[unit.name] = made[0]
            else:
                alike = [held for held in made if held.numel() == made[0].numel()]
                self.given |= {f"{unit.name}.{number}": held for number, held in enumerate(alike)}
            return output

        return cut


def _leaves(value: Any) -> Any:
    """The same with every floating-point tensor as a leaf of its own."""
    if isinstance(value, Tensor):
        return value.detach().requires_grad_(True) if value.is_floating_point() else value
    if isinstance(value, tuple) and type(value) is tuple:
        return tuple(map(_leaves, value))
    return [_leaves(item) for item in value] if isinstance(value, list) else value


class _Sums:
    """The sums of a wiring over leaves, with the gradients that they have."""

    def __init__(self, layer: torch.nn.Module, wiring: LayerParts, leaves: dict[str, Tensor], generator: Any):
        self.layer, self.leaves, self.generator = layer, leaves, generator
        self.made = {unit.name: unit for unit in wiring.units if not unit.is_module}

    def _value(self, terms: Mapping[str, float], shape: torch.Size) -> Tensor | None:
        """None where a term is no leaf."""
        total: Tensor | None = None
        for name, factor in terms.items():
            value = self._made(self.made[name], shape) if name in self.made else self.leaves.get(name)
            if value is None or value.numel() != shape.numel():
                return None
            total = value.reshape(shape) * factor + (0.0 if total is None else total)
        return total

    def _made(self, unit: Unit, shape: torch.Size) -> Tensor | None:
        """What the layer itself makes of values: them side by side, or one times a parameter of its own."""
        if unit.role == "beside":
            part = torch.Size((*shape[:-1], shape[-1] // len(unit.inputs)))
            values = [self._value(terms, part) for terms in unit.inputs]
            return None if any(value is None for value in values) else torch.cat(values, -1)  # type: ignore[arg-type]
        value = self._value(unit.reads, shape)
        return None if value is None else value * getattr(self.layer, unit.path)

    def differ(self, found: Tensor, terms: Mapping[str, float]) -> str:
        """How what was found is another function of the leaves than the sum; "" where it is none."""
        wanted = self._value(terms, found.shape)
        if wanted is None:
            return ""
        if not _equal(found, wanted):
            return "its value differs"
        return self._gradients_differ(found, wanted, list(self.leaves.values()))

    def handed_on(self, more: list[Tensor], routes: list[Tensor]) -> str:
        """The same for arguments that must be what a router gave, as it is."""
        for held in more:
            like = [route for route in routes if route.shape == held.shape and torch.equal(route, held)]
            if like and (wrong := self._gradients_differ(held, like[0] * 1.0, routes)):
                return wrong
            if not like and held.requires_grad:
                return "it is computed from what the router gave"
        return ""

    def _gradients_differ(self, found: Tensor, wanted: Tensor, leaves: list[Tensor]) -> str:
        cotangent = torch.randn(wanted.shape, generator=self.generator, dtype=torch.float64)
        zero = [torch.zeros_like(leaf) for leaf in leaves]
        theirs: Any = zero
        if found.requires_grad:
            theirs = torch.autograd.grad(
                found, leaves, cotangent, retain_graph=True, allow_unused=True, materialize_grads=True
            )
        ours = torch.autograd.grad(
            wanted, leaves, cotangent, retain_graph=True, allow_unused=True, materialize_grads=True
        )
        for one, other in zip(theirs, ours, strict=True):
            if not _equal(one, other):
                miss = float(torch.linalg.vector_norm(one - other) / torch.linalg.vector_norm(other).clamp(min=1e-300))
                return f"a gradient differs by {miss:.1e}"
        return ""


def _equal(found: Tensor, wanted: Tensor) -> bool:
    size = float(torch.linalg.vector_norm(wanted.detach()))
    miss = float(torch.linalg.vector_norm((found - wanted).detach()))
    return miss <= _EXACT * size
