"""A decoder layer: named parts, and what each of them reads."""

from collections.abc import Mapping
from typing import overload

from torch import Tensor, nn

from .context import Context
from .wiring import PAST, inputs_of, terms_of, weighted_sum


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
    nothing of it is copied.
    """

    def __init__(self, parts: Mapping[str, nn.Module], reads: Mapping[str, str], gives: str, keeps: str = ""):
        super().__init__()
        known = {"x", PAST}
        for name, text in (*reads.items(), ("", gives), *([("", keeps)] if keeps else [])):
            for terms in inputs_of(text):
                if missing := [term for term, _ in terms if term.partition(".")[0] not in known]:
                    raise ValueError(f"{name or 'the layer'} reads {missing[0]}, which is no part before it")
                if len(terms) > 1 and any(term == PAST for term, _ in terms):
                    raise ValueError(f"{name or 'the layer'} adds to {PAST}, which is no single value")
            known.add(name)
        if reads.keys() != parts.keys():
            raise ValueError(f"parts {sorted(parts)} are wired as {sorted(reads)}")
        self.wiring = tuple((name, inputs_of(text)) for name, text in reads.items())
        self.gives = terms_of(gives)
        self.keeps = terms_of(keeps) if keeps else None
        for name in reads:
            self.add_module(name, parts[name])

    @overload
    def forward(self, x: Tensor, context: Context) -> Tensor: ...
    @overload
    def forward(self, x: tuple[Tensor, ...], context: Context) -> tuple[Tensor, ...]: ...
    def forward(self, x: Tensor | tuple[Tensor, ...], context: Context) -> Tensor | tuple[Tensor, ...]:
        past, stream = (x[:-1], x[-1]) if isinstance(x, tuple) else ((), x)
        values = {"x": stream}
        for name, inputs in self.wiring:
            part, read = self.get_submodule(name), []
            for terms in inputs:
                read += past if terms[0][0] == PAST else [weighted_sum(terms, values)]
            out = part(*read, context) if getattr(part, "uses_context", False) else part(*read)
            if isinstance(out, tuple):
                values |= {f"{name}.{number}": value for number, value in enumerate(out)}
            else:
                values[name] = out
        given = weighted_sum(self.gives, values)
        if not isinstance(x, tuple):
            return given
        kept = () if self.keeps is None else (weighted_sum(self.keeps, values),)
        return *past, *kept, given
