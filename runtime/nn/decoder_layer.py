"""A decoder layer: named parts, and what each of them reads."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import NamedTuple, overload

from torch import Tensor, nn

from .context import Context
from .loop import MESSAGE
from .wiring import PAST, Terms, inputs_of, terms_of, weighted_sum


class _Wiring(NamedTuple):
    """steps: (name of the value, part that makes it, the sums that it reads), in order. gives: what the layer gives."""

    steps: tuple[tuple[str, str, tuple[Terms, ...]], ...]
    gives: Terms


class DecoderLayer(nn.Module):
    """x: [T, H] -> [T, H], or a tuple of such tensors -> a tuple.

    reads: for each part, in the order in which they run, the sum that it reads, over "x" (the layer's input) and parts
    before it. gives: the sum that the layer returns. A pre-norm layer, for one, is

        mixer_norm <- x,  mixer <- mixer_norm,  ffn_norm <- x + mixer,  ffn <- ffn_norm,  gives x + mixer + ffn

    and a sandwich, a parallel layer or one with residual multipliers differs in these sums only. A part with several
    inputs reads several sums, "x, mixer"; one that returns a tuple leaves the values "name.0", "name.1", ...

    Where layers look back at what came before them, the stream is a tuple: what was kept, the earliest first, then x.
    Parts read all that was kept as "past". keeps: the value that the layer adds to it, "" for none. The tuple is handed
    on from layer to layer and holds the very tensors that were kept: recomputed layers get it with their input, and
    nothing of it is copied. "past.0" is the first of what was kept, by itself.

    shared: parts that other layers have too. They belong to the model, which holds their parameters once; this is use
    number `use` of them, as their context says.

    again: of a layer that runs several times (`Loop`), how it is wired in passes after the first, where that differs:
    value -> (the part that makes it, what that reads), in order. A part may run more than once, and there may be parts
    that only run here. "message.0", "message.1", ... are what the layer is handed of the pass before. again_gives: the
    sum that it then returns.
    """

    def __init__(
        self,
        parts: Mapping[str, nn.Module],
        reads: Mapping[str, str],
        gives: str,
        keeps: str = "",
        shared: Mapping[str, nn.Module] | None = None,
        use: int = 0,
        again: Mapping[str, tuple[str, str]] | None = None,
        again_gives: str = "",
    ):
        super().__init__()
        # In a dict, which registers no modules.
        self.shared, self.use = dict(shared or {}), use
        self.wiring = _wired({name: (name, text) for name, text in reads.items()}, gives, keeps, {"x", PAST})
        self.again = None if again is None else _wired(again, again_gives, keeps, {"x", PAST, MESSAGE})
        self.keeps = terms_of(keeps) if keeps else None
        wired = [*reads, *(part for part, _ in (again or {}).values() if part not in reads)]
        if set(wired) != parts.keys() | self.shared.keys() or parts.keys() & self.shared.keys():
            raise ValueError(f"parts {sorted((*parts, *self.shared))} are wired as {sorted(set(wired))}")
        for name in wired:
            if name in parts and name not in self._modules:
                self.add_module(name, parts[name])

    def all_parts(self) -> Iterator[tuple[str, nn.Module]]:
        """Its own parts and those that it shares, by name in the order in which they run."""
        steps = (*self.wiring.steps, *(self.again.steps if self.again is not None else ()))
        for name in dict.fromkeys(part for _, part, _ in steps):
            yield name, self._part(name)

    def _part(self, name: str) -> nn.Module:
        return self.shared[name] if name in self.shared else self.get_submodule(name)

    @overload
    def forward(self, x: Tensor, context: Context) -> Tensor: ...
    @overload
    def forward(self, x: tuple[Tensor, ...], context: Context) -> tuple[Tensor, ...]: ...
    def forward(self, x: Tensor | tuple[Tensor, ...], context: Context) -> Tensor | tuple[Tensor, ...]:
        past, stream = (x[:-1], x[-1]) if isinstance(x, tuple) else ((), x)
        values = {"x": stream, **{f"{PAST}.{number}": kept for number, kept in enumerate(past)}}
        message = None if context is None else context.message  # parts that need no context run without one
        values |= {f"{MESSAGE}.{number}": value for number, value in enumerate(message or ())}
        wiring = self.wiring if message is None or self.again is None else self.again
        for name, runs, inputs in wiring.steps:
            part = self._part(runs)
            read: list[Tensor] = []
            for terms in inputs:
                read += past if terms[0][0] == PAST else [weighted_sum(terms, values)]
            own = replace(context, use=self.use) if runs in self.shared else context
            out = part(*read, own) if getattr(part, "uses_context", False) else part(*read)
            if isinstance(out, tuple):
                values |= {f"{name}.{number}": value for number, value in enumerate(out)}
            else:
                values[name] = out
        given = weighted_sum(wiring.gives, values)
        if not isinstance(x, tuple):
            return given
        kept = () if self.keeps is None else (weighted_sum(self.keeps, values),)
        return *past, *kept, given


def _wired(steps: Mapping[str, tuple[str, str]], gives: str, keeps: str, known: set[str]) -> _Wiring:
    """steps: value -> (part, what it reads). Raises ValueError for a sum of what is not there."""
    known = set(known)
    texts = [(name, text) for name, (_, text) in steps.items()]
    for name, text in (*texts, ("", gives), *([("", keeps)] if keeps else [])):
        for terms in inputs_of(text):
            if missing := [term for term, _ in terms if term.partition(".")[0] not in known]:
                raise ValueError(f"{name or 'the layer'} reads {missing[0]}, which is no part before it")
            if len(terms) > 1 and any(term == PAST for term, _ in terms):
                raise ValueError(f"{name or 'the layer'} adds to {PAST}, which is no single value")
        known.add(name)
    return _Wiring(tuple((name, part, inputs_of(text)) for name, (part, text) in steps.items()), terms_of(gives))
