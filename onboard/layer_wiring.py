"""How the parts of a layer are wired: every part's input, and the layer's output, solved as a sum of earlier values.

Nothing is known about the layer beforehand. Its units are the children through which the stream flows; a unit that no
block explains can be expanded into its own children.
"""

import contextlib
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dayzero.onboard.calls import Call, Undiscovered, same, tensors

_EXACT = 1e-9  # relative; a sum that misses by more is none


@dataclass
class Unit:
    """A part of a layer. path: relative to the layer. role: "norm", "mixer", "ffn", or "scale" for a parameter of the
    layer that multiplies what it reads. reads: earlier value ("x" is the layer's input) -> factor."""

    name: str
    path: str
    role: str
    reads: dict[str, float]


@dataclass
class LayerParts:
    """The units of a layer in the order in which they ran, and the sum that the layer gives."""

    units: list[Unit]
    gives: dict[str, float]


def layer_parts(calls: Mapping[str, Call], layer: str, expanded: Collection[str] = ()) -> LayerParts:
    """The wiring of the layer at the path `layer`. expanded: children to look into, because no block explains them.

    Where the children as they stand are not wired by sums, each of them with children of its own is looked into in
    turn. Raises Undiscovered.
    """
    try:
        return _wiring(calls, layer, expanded)
    except Undiscovered as error:
        for path, call in _units(calls, layer, expanded).items():
            if any(True for _ in call.module.children()):
                with contextlib.suppress(Undiscovered):
                    return _wiring(calls, layer, {*expanded, path})
        raise error from None


def _wiring(calls: Mapping[str, Call], layer: str, expanded: Collection[str]) -> LayerParts:
    values, sums = {"x": calls[layer].hidden}, [{"x": 1.0}]
    units: list[Unit] = []
    owner = calls[layer].module

    def explain(wanted: Tensor, what: str) -> dict[str, float]:
        """The sum that makes `wanted`; scales that it needs become units, and values for what follows."""
        found, scales = _explained(wanted, values, sums, owner, what)
        for unit, value in scales:
            units.append(unit)
            values[unit.name] = value
        if found not in sums:
            sums.append(found)
        return found

    for path, call in _units(calls, layer, expanded).items():
        if hears_more(call, calls[layer]):
            raise Undiscovered(f"{layer}.{path} is handed more of the stream than its input")
        reads = explain(call.hidden, f"input of {layer}.{path}")
        units.append(Unit(path, path, _role(call), reads))
        values[path] = call.result
    gives = explain(calls[layer].result, f"output of {layer}")
    needed = _needed(units, gives)
    if not needed:
        raise Undiscovered(f"{layer}: nothing of what it computes is made by its children")
    return _named(LayerParts(needed, gives))


def _units(calls: Mapping[str, Call], layer: str, expanded: Collection[str]) -> dict[str, Call]:
    """Children through which the stream flows, by path relative to the layer, but for those that change nothing."""
    size = calls[layer].result.numel()
    units = {}
    for path, call in calls.items():
        if not path.startswith(layer + ".") or not call.has_stream:
            continue
        relative = path.removeprefix(layer + ".")
        parents = {relative[:dot] for dot in range(len(relative)) if relative[dot] == "."}
        if relative in expanded or not all(p in expanded or p in _lists(calls[layer].module) for p in parents):
            continue
        if call.result.numel() == size and not (call.hidden.numel() == size and same(call.hidden, call.result)):
            units[relative] = call
    return units


def hears_more(call: Call, layer: Call) -> bool:
    """Whether an argument of the call beside its hidden input depends on the layer's input: then the module is no
    function of its hidden input, however well it is reproduced with that argument held fixed."""
    known = tensors((layer.args, layer.kwargs))
    others = [t for t in tensors((call.args, call.kwargs)) if t is not call.hidden]
    if all(any(other is held for held in known) for other in others):
        return False
    seen: list[list[Tensor]] = []

    def note(module: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append(tensors((args, kwargs)))

    handle = call.module.register_forward_pre_hook(note, with_kwargs=True)
    try:
        with torch.no_grad():
            layer.replay(layer.hidden)
            moved = layer.hidden + 0.1 * torch.cos(torch.arange(layer.hidden.numel())).reshape(layer.hidden.shape)
            layer.replay(moved)
    finally:
        handle.remove()
    if len(seen) != 2 or len(seen[0]) != len(seen[1]):
        return True
    position = next((i for i, t in enumerate(seen[0]) if same(t, call.hidden)), -1)
    pairs = zip(*seen, strict=True)
    return any(not torch.equal(a, b) for i, (a, b) in enumerate(pairs) if i != position)


def _lists(layer: nn.Module) -> set[str]:
    """Plain lists of modules inside the layer: they are no units, their members may be."""
    return {path for path, module in layer.named_modules() if isinstance(module, (nn.ModuleList, nn.ModuleDict))}


def _role(call: Call) -> str:
    if all(parameter.ndim <= 1 for parameter in call.module.parameters()) and not mixes_tokens(call):
        return "norm"
    return "mixer" if mixes_tokens(call) else "ffn"


def mixes_tokens(call: Call) -> bool:
    """Whether the output for a token depends on the other tokens: one token is changed and the rest watched."""
    hidden = call.hidden
    changed = hidden.clone()
    changed[:, 0] += 1.0
    with torch.no_grad():
        before, after = call.replay(hidden), call.replay(changed)
    if before.numel() != hidden.numel():
        return False
    before, after = before.reshape(hidden.shape)[:, 1:], after.reshape(hidden.shape)[:, 1:]
    # Not bitwise: an expert's matrix product rounds differently when it has other rows beside these.
    return bool((before - after).abs().max() > 1e-9 * before.abs().max())


def _explained(
    wanted: Tensor, values: Mapping[str, Tensor], sums: list[dict[str, float]], layer: nn.Module, what: str
) -> tuple[dict[str, float], list[tuple[Unit, Tensor]]]:
    """`wanted` as a sum of values; also of values and earlier sums multiplied by vectors that the layer itself owns,
    which become units of their own. Raises Undiscovered."""
    if found := solve(wanted, values):
        return found, []
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


def solve(wanted: Tensor, values: Mapping[str, Tensor]) -> dict[str, float]:
    """`wanted` as a linear combination of `values` (least squares): the terms with their factors, {} if it is none.

    A value that equals an earlier one is left out: it is the same value under another name.
    """
    names: list[str] = []
    for name, value in values.items():
        if value.numel() == wanted.numel():
            if same(value.reshape(wanted.shape), wanted):
                return {name: 1.0}
            if not any(same(value.reshape(wanted.shape), values[other].reshape(wanted.shape)) for other in names):
                names.append(name)
    if not names or not bool(wanted.isfinite().all()):
        return {}
    basis = torch.stack([values[name].reshape(-1) for name in names], 1)
    target = wanted.reshape(-1, 1)
    factors = torch.linalg.lstsq(basis, target, driver="gelsd").solution[:, 0]
    if not torch.linalg.norm(basis @ factors[:, None] - target) <= _EXACT * torch.linalg.norm(target):
        return {}
    sizes = basis.norm(dim=0) / target.norm()
    kept = {
        name: _cleaned(float(factor))
        for name, factor, size in zip(names, factors, sizes, strict=True)
        if abs(float(factor * size)) > _EXACT
    }
    again = sum(values[name].reshape(-1) * factor for name, factor in kept.items())
    exact = torch.linalg.norm(again - target[:, 0]) <= _EXACT * torch.linalg.norm(target)
    return kept if bool(exact) else {}


def _cleaned(factor: float) -> float:
    """The nearest short decimal where the factor is one up to rounding."""
    short = float(f"{factor:.10g}")
    return short if abs(short - factor) <= 1e-11 * abs(factor) else factor


def _needed(units: list[Unit], gives: Mapping[str, float]) -> list[Unit]:
    """The units that the output depends on, in order."""
    wanted, kept = set(gives), []
    for unit in reversed(units):
        if unit.name in wanted:
            kept.append(unit)
            wanted |= unit.reads.keys()
    return kept[::-1]


def _named(parts: LayerParts) -> LayerParts:
    """Names by role: mixer, ffn; a norm is named after the one part it feeds, or else the one it follows."""
    role_of = {unit.name: unit.role for unit in parts.units}
    names: dict[str, str] = {"x": "x"}

    def add(old: str, stem: str) -> None:
        taken, number, name = set(names.values()), 2, stem
        while name in taken:
            name, number = f"{stem}_{number}", number + 1
        names[old] = name

    for unit in parts.units:
        if unit.role in {"mixer", "ffn"}:
            add(unit.name, unit.role)
    for unit in parts.units:
        if unit.role == "norm":
            readers = [u for u in parts.units if unit.name in u.reads]
            source = next(iter(unit.reads)) if len(unit.reads) == 1 else "x"
            if len(readers) == 1 and len(readers[0].reads) == 1 and readers[0].role in {"mixer", "ffn"}:
                add(unit.name, f"{names[readers[0].name]}_norm")
            elif role_of.get(source) in {"mixer", "ffn"}:
                add(unit.name, f"{names[source]}_post_norm")
            else:
                add(unit.name, "norm")
        elif unit.role == "scale":
            source = next(iter(unit.reads))
            add(unit.name, f"{'residual' if source == 'x' else names.get(source, 'value')}_scale")
    units = [
        Unit(names[unit.name], unit.path, unit.role, {names[name]: f for name, f in unit.reads.items()})
        for unit in parts.units
    ]
    return LayerParts(units, {names[name]: factor for name, factor in parts.gives.items()})
