"""A decoder layer: named parts, and what each of them reads."""

from collections.abc import Mapping

from torch import Tensor, nn

from .context import Context
from .wiring import terms_of, weighted_sum


class DecoderLayer(nn.Module):
    """x: [T, H] -> [T, H].

    reads: for each part, in the order in which they run, the sum that it reads, over "x" (the layer's input) and parts
    before it. gives: the sum that the layer returns. A pre-norm layer, for one, is

        mixer_norm <- x,  mixer <- mixer_norm,  ffn_norm <- x + mixer,  ffn <- ffn_norm,  gives x + mixer + ffn

    and a sandwich, a parallel layer or one with residual multipliers differs in these sums only.
    """

    def __init__(self, parts: Mapping[str, nn.Module], reads: Mapping[str, str], gives: str):
        super().__init__()
        known = {"x"}
        for name, text in (*reads.items(), ("", gives)):
            if missing := [term for term, _ in terms_of(text) if term not in known]:
                raise ValueError(f"{name or 'the layer'} reads {missing[0]}, which is no part before it")
            known.add(name)
        if reads.keys() != parts.keys():
            raise ValueError(f"parts {sorted(parts)} are wired as {sorted(reads)}")
        self.wiring = tuple((name, terms_of(text)) for name, text in reads.items())
        self.gives = terms_of(gives)
        for name in reads:
            self.add_module(name, parts[name])

    def forward(self, x: Tensor, context: Context) -> Tensor:
        values = {"x": x}
        for name, terms in self.wiring:
            part, read = self.get_submodule(name), weighted_sum(terms, values)
            values[name] = part(read, context) if getattr(part, "uses_context", False) else part(read)
        return weighted_sum(self.gives, values)
