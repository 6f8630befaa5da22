"""What a reference module is handed beside its hidden input, as the context that our blocks read.

Rotary tables come in many spellings: a pair of cosines and sines of two to four dimensions, each frequency once or
twice, or one complex tensor; by themselves or in a dict, as arguments or from a module inside. All become [T, pairs].
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from dayzero.onboard.oracle.calls import Call, tensors
from dayzero.onboard.structure.left import left_by_earlier
from dayzero.runtime.nn import Context
from dayzero.runtime.nn.context import Source, lengths_of, positions_of

__all__ = ["Table", "context_of", "handed_tables", "made_already", "rotary_tables", "tables_in"]


@dataclass(eq=False)
class Table:
    """cos, sin: [T, pairs], each frequency once. given: the tensors that the reference hands on, as they are."""

    cos: Tensor
    sin: Tensor
    given: tuple[Tensor, ...] = field(repr=False)

    def is_made_of(self, tensors: tuple[Tensor, ...]) -> bool:
        """Whether the table is these very tensors."""
        return len(tensors) == len(self.given) and all(a is b for a, b in zip(tensors, self.given, strict=True))

    def equals(self, other: "Table") -> bool:
        """Whether every document has the same table; one of them may have been made for one document only."""
        short, long = sorted((self, other), key=lambda table: table.cos.shape[0])
        rows, width = short.cos.shape
        if not rows or long.cos.shape[0] % rows or long.cos.shape[1] != width:
            return False
        pairs = ((long.cos, short.cos), (long.sin, short.sin))
        return all(bool((a.unflatten(0, (-1, rows)) == b).all()) for a, b in pairs)


def context_of(call: Call, inner: Mapping[str, Call] | None = None) -> Context:
    """The context of a call on a batch [B, S, H]: every row a document of its own.

    inner: the calls below it; tables that the module makes for itself count as handed, after those that are.
    """
    batch, length = call.hidden.shape[:2] if call.hidden.ndim > 2 else (1, call.hidden.shape[0])
    bounds = torch.arange(0, batch * length + 1, length)
    lengths = lengths_of(bounds, batch * length)
    tables = tuple((table.cos, table.sin) for table in handed_tables(call, inner))
    shared = left_by_earlier(call)
    if (scale := query_scale(call)) is not None:
        shared["query_scale"] = scale
    position = positions_of(lengths, bounds.device)
    source = None
    if call.source is not None:
        source = Source(call.source.flatten(0, 1), (call.source.shape[1],) * call.source.shape[0])
    return Context(bounds, lengths, position, tables, handed_ids(call, position), shared, source)


def handed_ids(call: Call, position: Tensor) -> Tensor | None:
    """[T]: the token ids, where the module is handed a whole number for each token that is not its position."""
    for value in [*call.args, *call.kwargs.values()]:
        if isinstance(value, Tensor) and value.dtype == torch.int64 and value.ndim in {1, 2}:
            flat = value.flatten()
            if flat.shape == position.shape and not torch.equal(flat, position) and not bool((flat == 1).all()):
                return flat
    return None


def rotary_tables(call: Call) -> tuple[tuple[Tensor, Tensor], ...]:
    """Every (cos, sin) among the arguments, each [T, pairs]."""
    return tuple((table.cos, table.sin) for table in handed_tables(call))


def handed_tables(call: Call, inner: Mapping[str, Call] | None = None) -> list[Table]:
    """The rotary tables of a call, in the order in which `Context.tables` has them: arguments, then outputs of inner
    calls that are no arguments already; equal ones once."""
    batch, length = call.hidden.shape[:2] if call.hidden.ndim > 2 else (1, call.hidden.shape[0])
    values: list[Any] = [*call.args, *call.kwargs.values()]
    values += [made.output for made in (inner or {}).values() if isinstance(made.output, (tuple, Tensor))]
    found: list[Table] = []
    for value in values:
        for table in tables_in(value, batch, length):
            if not any(table.equals(other) for other in found):
                found.append(table)
    return found


@contextlib.contextmanager
def made_already(inner: Mapping[str, Call]) -> Iterator[None]:
    """Calls that make rotary tables give what they gave for the same positions, without computing it."""
    replaced = []
    for call in inner.values():
        position = _positions(call.args, call.kwargs)
        if position is None or position.ndim < 2 or "forward" in vars(call.module):
            continue
        if any(True for _ in tables_in(call.output, *position.shape[-2:])):
            call.module.forward = partial(_as_before, [call, *call.later])  # type: ignore[method-assign]
            replaced.append(call.module)
    try:
        yield
    finally:
        for module in replaced:
            del module.forward


def _as_before(calls: list[Call], *args: Any, **kwargs: Any) -> Any:
    """What one of the calls gave for these positions."""
    wanted = _positions(args, kwargs)
    for call in calls:
        position = _positions(call.args, call.kwargs)
        if wanted is not None and position is not None and torch.equal(position, wanted):
            return call.output
    raise RuntimeError("rotary tables for other positions than before")


def _positions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return next((value for value in tensors((args, kwargs)) if not value.is_floating_point()), None)


def tables_in(value: Any, batch: int, length: int) -> Iterator[Table]:
    """Rotary tables for [batch, length] tokens inside nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        if value.is_complex() and (plain := _tokens_by_width(value, batch, length)) is not None:
            yield Table(plain.real, plain.imag, (value,))
    elif isinstance(value, Mapping):
        for held in value.values():
            yield from tables_in(held, batch, length)
    elif isinstance(value, (tuple, list)):
        if (table := _pair(value, batch, length)) is not None:
            yield table
        else:
            for held in value:
                yield from tables_in(held, batch, length)


def _pair(value: tuple | list, batch: int, length: int) -> Table | None:
    """Two tensors whose squares add up to one constant."""
    if len(value) != 2 or not all(isinstance(part, Tensor) and part.is_floating_point() for part in value):
        return None
    if value[0].shape != value[1].shape:
        return None
    cos, sin = (_tokens_by_width(part, batch, length) for part in value)
    if cos is None or sin is None:
        return None
    radius = cos.square() + sin.square()
    if not bool((radius - radius.flatten()[0]).abs().max() <= 1e-9 * radius.flatten()[0]):
        return None
    once = _each_once(cos, sin)
    return Table(cos[:, once], sin[:, once], tuple(value))


def _tokens_by_width(table: Tensor, batch: int, length: int) -> Tensor | None:
    """[T, width] of a table [S, W], [B or 1, S, W], with a dimension for heads, or one for kinds of positions that
    are all the same for text; None for anything else."""
    if table.ndim < 2 or not table.numel():
        return None
    if table.ndim == 4 and table.shape[0] > 1 and table.shape[1:3] in {(batch, length), (1, length)}:
        if not torch.equal(table, table[:1].expand_as(table)):
            return None
        table = table[0]
    if table.ndim == 4:
        table = table.squeeze(1) if table.shape[1] == 1 else table.squeeze(2)
    if table.ndim == 2:
        table = table[None]
    if table.ndim != 3 or table.shape[0] not in {1, batch} or table.shape[1] != length:
        return None
    return table.expand(batch, -1, -1).flatten(0, 1)


def _each_once(cos: Tensor, sin: Tensor) -> slice:
    """Which columns have every frequency once, where the reference repeats each for both channels of a pair."""
    pairs, odd = divmod(cos.shape[-1], 2)
    if not odd:
        if all(torch.equal(table[:, :pairs], table[:, pairs:]) for table in (cos, sin)):
            return slice(0, pairs)
        if all(torch.equal(table[:, 0::2], table[:, 1::2]) for table in (cos, sin)):
            return slice(0, None, 2)
    return slice(None)


def query_scale(call: Call) -> Tensor | None:
    """[T]: a positive number for each position that the module is handed, such as a temperature; None without one."""
    if call.hidden.ndim != 3:
        return None
    batch, length = call.hidden.shape[:2]
    for value in [*call.args, *call.kwargs.values()]:
        if not isinstance(value, Tensor) or not value.is_floating_point() or value is call.hidden:
            continue
        sizes = [size for size in value.shape if size != 1]
        if value.ndim >= 2 and sizes in ([length], [batch, length]) and bool((value > 0).all()):
            return value.reshape(-1, length).expand(batch, -1).flatten()
    return None
