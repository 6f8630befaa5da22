"""What a copy of the reference's code is handed: each argument of the captured call, in terms of what a layer has.

The stream, rotary tables, masks, positions, ids, what layers share, plain data: as `runtime.nn.lifted` gives them.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Evidence, Site, literal
from dayzero.onboard.lift.closure import LiftError


def handed_values(site: Site, cls: type[nn.Module]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameter of forward -> what it is made of, for those that it names and for those that it only passes on."""
    signature = inspect.signature(cls.forward)
    try:
        bound = signature.bind(None, *site.call.args, **site.call.kwargs)
    except TypeError as error:
        raise LiftError(f"{cls.__name__} is not called as its signature says: {error}") from None
    named: dict[str, Any] = {}
    others: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        kind = signature.parameters[name].kind
        if kind is inspect.Parameter.VAR_POSITIONAL:
            raise LiftError(f"{cls.__name__} is handed any number of arguments")
        if kind is inspect.Parameter.VAR_KEYWORD:
            others = {key: _described(f"{cls.__name__}.{key}", held, site) for key, held in value.items()}
        else:
            named[name] = _described(f"{cls.__name__}.{name}", value, site)
    given = [*named.values(), *others.values()]
    stream = [what for what in given if what in ("hidden", "streams") or (isinstance(what, dict) and "input" in what)]
    if not stream:
        raise LiftError(f"{cls.__name__} is not handed the stream as an argument of its own")
    return named, others


def _described(name: str, value: Any, site: Site) -> Any:
    """What an argument is made of, as `runtime.nn.lifted` gives it. Raises LiftError where nothing explains it."""
    if isinstance(value, Tensor):
        found = _tensor(value, site)
        if found is None:
            raise LiftError(f"{name} is handed {list(value.shape)} {value.dtype}, which nothing here explains")
        return found
    if isinstance(value, (tuple, list)):
        pair = _table(tuple(value), site)
        return pair or {"many": [_described(name, held, site) for held in value]}
    if isinstance(value, Mapping):
        return {"named": {str(key): _described(name, held, site) for key, held in value.items()}}
    if value is None or isinstance(value, (bool, str, float)):
        return {"value": value}
    if isinstance(value, int):
        return "length" if value == site.call.hidden.shape[-2] else {"value": value}
    raise LiftError(f"{name} is handed {type(value).__name__}, which is no plain data")


def _tensor(value: Tensor, site: Site) -> Any:
    inputs = site.call.inputs
    if len(inputs) > 1 and len({held.shape for held in inputs}) == 1:
        for place, held in enumerate(inputs):
            if value is held:
                return {"input": place, "of": len(inputs)}
    if value is site.call.hidden:
        return "hidden" if value.ndim < 4 else "streams"
    batch, length = _sizes(site)
    if (table := _table((value,), site)) is not None:
        return table
    if value.shape[-2:] == (length, length) and (mask := _mask(value, site)) is not None:
        return mask
    axes = _axes(value.shape, batch, length)
    if axes is None:
        return None
    plain = _by_token(value, axes, batch, length)
    if plain is None:
        return None
    context = site.context
    if not value.is_floating_point() and plain.ndim == 1:
        if torch.equal(plain.long(), context.position):
            return {"position": axes}
        if context.ids is not None and torch.equal(plain.long(), context.ids):
            return {"ids": axes}
    if plain.ndim == 1 and bool((plain == 1).all()):
        return {"ones": axes, "dtype": str(value.dtype).removeprefix("torch.")}
    for name, held in context.shared.items():
        flat = held.reshape(held.shape[0], -1)
        if flat.numel() == plain.numel() and torch.equal(flat.to(plain.dtype), plain.reshape(flat.shape)):
            return {"shared": name, "axes": axes, "dtype": str(value.dtype).removeprefix("torch.")}
    return None


def _sizes(site: Site) -> tuple[int, int]:
    """(documents, tokens of each) of the captured call."""
    lengths = site.context.lengths
    return len(lengths), lengths[0]


def _axes(shape: torch.Size, batch: int, length: int) -> str | None:
    """A letter for each dimension: b documents, s tokens, d what is left, a digit for copies; None if no tokens."""
    axes = ""
    for place, size in enumerate(shape):
        if size == length and "s" not in axes:
            axes += "s"
        elif "s" not in axes and size == batch and batch > 1:
            axes += "b"
        elif size == 1 or ("s" not in axes and size < 10):
            axes += str(size)
        elif "s" in axes and place == len(shape) - 1:
            axes += "d"
        else:
            return None
    if "s" not in axes:
        return None
    # One row for all documents is a row for each.
    return axes if "b" in axes or not axes.startswith("1") else "b" + axes[1:]


def _by_token(value: Tensor, axes: str, batch: int, length: int) -> Tensor | None:
    """[T] or [T, d] of a tensor with these axes; None where copies differ."""
    if "b" in axes:
        place = axes.index("b")
        value = value.expand(*value.shape[:place], batch, *value.shape[place + 1 :])
    else:
        value, axes = value.unsqueeze(0).expand(batch, *value.shape), "b" + axes
    for place in reversed(range(len(axes))):
        if axes[place].isdigit():
            first = value.select(place, 0)
            if not torch.equal(value, first.unsqueeze(place).expand_as(value)):
                return None
            value = first
    order = [axis for axis in axes if not axis.isdigit()]
    if order[:2] != ["b", "s"]:
        return None
    return value.flatten(0, 1)


def _table(value: tuple, site: Site) -> Any:
    """A rotary table of the context in the spelling of `value`: a pair, one of the two, or complex."""
    if len(value) not in {1, 2} or not all(isinstance(part, Tensor) for part in value):
        return None
    if len(value) == 2 and (value[0].shape != value[1].shape or not value[0].is_floating_point()):
        return None
    batch, length = _sizes(site)
    axes = _axes(value[0].shape, batch, length)
    if axes is None:
        return None
    plain = [_by_token(part, axes, batch, length) for part in value]
    if any(part is None or part.ndim != 2 for part in plain):
        return None
    for number, (cos, sin) in enumerate(site.context.tables):
        for style in ("half", "interleaved", "once"):
            tables = {"cos": _spread(cos, style), "sin": _spread(sin, style)}
            made = {"table": number, "style": style, "axes": axes}
            if len(value) == 2:
                if _all_equal(plain, list(tables.values())):
                    return {**made, "part": "pair"}
            elif value[0].is_complex():
                if style == "once" and _all_equal(plain, [torch.complex(cos, sin)]):
                    return {**made, "part": "complex"}
            else:
                for part, table in tables.items():
                    if _all_equal(plain, [table]):
                        return {**made, "part": part}
    return None


def _spread(table: Tensor, style: str) -> Tensor:
    if style == "half":
        return torch.cat((table, table), -1)
    return table.repeat_interleave(2, -1) if style == "interleaved" else table


def _all_equal(ours: list[Any], theirs: list[Tensor]) -> bool:
    return all(a.shape == b.shape and torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


def _mask(value: Tensor, site: Site) -> Any:
    """A mask [.., S, S] that hides the future, and what is out of a window or chunk."""
    batch, length = _sizes(site)
    first = value.reshape(-1, length, length)
    if not torch.equal(first, first[:1].expand_as(first)):
        return None
    row = first[0]
    axes = "".join("b" if size == batch and place == 0 else str(size) for place, size in enumerate(value.shape[:-2]))
    if any(size > 9 for size in value.shape[:-2]):
        return None
    made: dict[str, Any] = {"axes": axes.replace("1", "b", 1) if axes.startswith("1") else axes}
    made["axes"] += "st"
    if value.is_floating_point():
        if not bool(((row == 0) | (row < -1e30)).all()):
            return None
        visible, made["mask"] = row == 0, "added"
    else:
        place = torch.arange(length)
        for sign in (1, -1):
            if value.dtype == torch.int64 and torch.equal(row, sign * (place[:, None] - place)):
                return {"distance": sign, "axes": made["axes"]}
        if value.dtype != torch.bool and not bool(((row == 0) | (row == 1)).all()):
            return None
        visible = row.bool()
        made["mask"], made["dtype"] = "visible", str(value.dtype).removeprefix("torch.")
        if bool(visible[0, 0].logical_not()):
            visible, made["mask"] = ~visible, "hidden"
    place = torch.arange(length)
    age = place[:, None] - place
    if bool(visible.all()):
        return {**made, "full": True, "window": None, "chunk": None}
    if torch.equal(visible, age >= 0):
        return {**made, "window": None, "chunk": None}
    widest = int(visible.sum(-1).max())
    if torch.equal(visible, (age >= 0) & (age < widest)):
        return {**made, "window": _field(site, widest), "chunk": None}
    if torch.equal(visible, (age >= 0) & (place[:, None] // widest == place // widest)):
        return {**made, "window": None, "chunk": _field(site, widest)}
    return None


def _field(site: Site, value: int) -> Evidence:
    """Where a width of a mask comes from: a config field, an attribute, or just the mask."""
    found = site.explain(value, handed=True)
    found.sort(key=lambda evidence: not evidence.label.startswith("config "))
    return found[0] if found else literal(value, "the mask's band")


def without_mask(what: Any) -> Any:
    return {"value": None} if isinstance(what, dict) and "mask" in what else what


def resolver(handed: Any) -> Callable[[nn.Module, Any], Any]:
    def resolve(module: nn.Module, config: Any) -> Any:
        def walk(value: Any) -> Any:
            if isinstance(value, Evidence):
                return value.resolve(module, config)
            if isinstance(value, dict):
                return {name: walk(held) for name, held in value.items()}
            return [walk(held) for held in value] if isinstance(value, list) else value

        return walk(handed)

    return resolve


def shown(handed: Any) -> str:
    """The description of what is handed in a line, evidence by its label."""
    if isinstance(handed, Evidence):
        return handed.label
    if isinstance(handed, dict):
        return "{" + ", ".join(f"{name}: {shown(held)}" for name, held in handed.items()) + "}"
    return "[" + ", ".join(map(shown, handed)) + "]" if isinstance(handed, list) else str(handed)
