"""Documents as lifted code sees them: what it is handed, in the shapes that it was written for."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .context import Context
from .lifted_settings import settings_value


@dataclass
class Document:
    """Equally long documents as the lifted code sees them, or all of them as one. x: [T, H], T = B S.

    lengths: of the documents, where they are handed as one.
    """

    x: Tensor
    context: Context
    tables: list[int]
    flat: bool
    lengths: tuple[int, ...] | None = None

    @property
    def batch(self) -> int:
        return 1 if self.lengths is not None else max(len(self.context.lengths), 1)

    @property
    def length(self) -> int:
        return self.x.shape[0] // self.batch

    def give(self, what: Any) -> Any:
        """The argument that `what` describes:

        "hidden" the input; "streams" the same where it is several, [.., n, H]; {"input": place, "of": count} one of
        several inputs; "length" of the document;
        {"value": plain} itself; {"many": [...]} a tuple;
        {"named": {...}} a dict; {"position": axes} and {"ids": axes} integers; {"ones": axes, "dtype": name};
        {"table": number, "part": "pair" | "cos" | "sin" | "complex", "style": "half" | "interleaved" | "once",
        "axes": axes}; {"shared": name, "axes": axes, "dtype": name};
        {"mask": "added" | "visible" | "hidden", "window": tokens or None, "chunk": tokens or None, "full": bool,
        "axes": axes, "dtype": name}; {"distance": 1 or -1, "axes": axes} how far each token is from each other.
        axes: one letter a dimension: b documents, s tokens, t tokens seen, d what is left, a digit for that many
        copies.
        """
        if what in ("hidden", "streams"):
            return self.x if self.flat else self.x.unflatten(0, (self.batch, self.length))
        if what == "length":
            return self.length
        if "input" in what:
            return self.give("hidden").chunk(what["of"], -1)[what["input"]]
        if "value" in what:
            return settings_value(what["value"])
        if "many" in what:
            return tuple(self.give(held) for held in what["many"])
        if "named" in what:
            return {name: self.give(held) for name, held in what["named"].items()}
        if "position" in what:
            return self._shaped(self.context.position, what["position"])
        if "ids" in what:
            if self.context.ids is None:
                raise ValueError("lifted code needs the token ids, but the context has none")
            return self._shaped(self.context.ids, what["ids"])
        if "ones" in what:
            ones = torch.ones(self.x.shape[0], dtype=getattr(torch, what["dtype"]), device=self.x.device)
            return self._shaped(ones, what["ones"])
        if "shared" in what:
            held = self.context.shared[what["shared"]]
            held = held.flatten(1) if "d" in what["axes"] else held.flatten()
            return self._shaped(held.to(getattr(torch, what["dtype"])), what["axes"])
        if "table" in what:
            return self._table(what)
        if "mask" in what:
            return self._mask(what)
        if "distance" in what:
            place = torch.arange(self.length, device=self.x.device)
            return self._repeated(what["distance"] * (place[:, None] - place), what["axes"])
        raise ValueError(f"no argument is made of {what!r}")

    def _shaped(self, tokens: Tensor, axes: str) -> Tensor:
        """[T, ...] with the dimensions that `axes` names."""
        made = tokens.unflatten(0, (self.batch, self.length))
        if "b" not in axes:
            made = made[0]
        order = [axis for axis in axes if axis in "bsd"]
        if "d" in order and made.ndim > len(order):
            made = made.flatten(len(order) - 1)
        for place, axis in enumerate(axes):
            if axis.isdigit():
                made = made.unsqueeze(place)
                if axis != "1":
                    made = made.expand(*made.shape[:place], int(axis), *made.shape[place + 1 :])
        return made

    def _table(self, what: Mapping[str, Any]) -> Any:
        number = self.tables[what["table"]]
        if number >= len(self.context.tables):
            raise ValueError(f"lifted code reads rotary table {number}, but the model has {len(self.context.tables)}")
        cos, sin = (_spread(table, what["style"]) for table in self.context.tables[number])
        if what["part"] == "complex":
            return self._shaped(torch.complex(cos, sin), what["axes"])
        made = (self._shaped(cos, what["axes"]), self._shaped(sin, what["axes"]))
        return {"pair": made, "cos": made[0], "sin": made[1]}[what["part"]]

    def _mask(self, what: Mapping[str, Any]) -> Tensor:
        place = torch.arange(self.length, device=self.x.device)
        age = place[:, None] - place
        visible = torch.ones_like(age, dtype=torch.bool) if what.get("full") else age >= 0
        if what.get("window") is not None:
            visible = visible & (age < what["window"])
        if what.get("chunk") is not None:
            visible = visible & (place[:, None] // what["chunk"] == place // what["chunk"])
        if self.lengths is not None:
            document = torch.repeat_interleave(
                torch.arange(len(self.lengths), device=self.x.device), torch.tensor(self.lengths, device=self.x.device)
            )
            visible = visible & (document[:, None] == document)
        made = ~visible if what["mask"] == "hidden" else visible
        if what["mask"] == "added":
            made = torch.zeros(visible.shape, dtype=self.x.dtype, device=self.x.device)
            made = made.masked_fill(~visible, torch.finfo(self.x.dtype).min)
        else:
            made = made.to(getattr(torch, what.get("dtype", "bool")))
        return self._repeated(made, what["axes"])

    def _repeated(self, made: Tensor, axes: str) -> Tensor:
        """[S, S] with the dimensions before it that `axes` names."""
        for place, axis in enumerate(axes):
            if axis not in "st":
                size = self.batch if axis == "b" else int(axis)
                made = made.unsqueeze(place).expand(*made.shape[:place], size, *made.shape[place:])
        return made

    def flatten(self, made: Tensor) -> Tensor:
        """[T, ...] of a tensor [B, S, ...] or [T, ...]."""
        return made.flatten(0, 1) if made.shape[:2] == (self.batch, self.length) else made


def _spread(table: Tensor, style: str) -> Tensor:
    """[T, pairs] -> [T, dim]: each frequency once, or for both channels of its pair."""
    if style == "half":
        return torch.cat((table, table), -1)
    return table.repeat_interleave(2, -1) if style == "interleaved" else table


def documents(x: Tensor, context: Context) -> Iterator[tuple[Tensor, Context]]:
    """Each document with a context of its own; what an earlier layer left is cut to it."""
    start = 0
    for length in context.lengths:
        stop = start + length
        if length:
            shared = {
                name: held[start:stop] if held.shape[:1] == x.shape[:1] else held
                for name, held in context.shared.items()
            }
            yield (
                x[start:stop],
                replace(
                    context,
                    cu_seqlens=torch.tensor([0, length], device=context.cu_seqlens.device),
                    lengths=(length,),
                    position=context.position[start:stop],
                    tables=tuple((cos[start:stop], sin[start:stop]) for cos, sin in context.tables),
                    ids=None if context.ids is None else context.ids[start:stop],
                    shared=shared,
                ),
            )
        start = stop
