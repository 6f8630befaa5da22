"""How the parts of a layer are wired: each reads a sum of what stands before it, written as "x + 0.22 * mixer".

A part with several inputs reads several sums, "x, mixer_post_norm"; of a part with several outputs, "queries.1" is the
second.
"""

from collections.abc import Mapping, Sequence

from torch import Tensor

Terms = tuple[tuple[str, float], ...]
PAST = "past"  # what earlier layers kept of the stream, one input each


def terms_of(text: str) -> Terms:
    """("x", 1.0), ("mixer", 0.22) for "x + 0.22 * mixer". Raises ValueError for anything else than such a sum."""
    terms = []
    for term in text.replace(" - ", " + -1.0 * ").split(" + "):
        factor, star, name = term.rpartition(" * ")
        part, dot, output = name.partition(".")
        if not part.isidentifier() or (dot and not output.isdecimal()):
            raise ValueError(f"{text!r} is not a sum of named values, such as 'x + 0.5 * mixer'")
        terms.append((name, float(factor) if star else 1.0))
    if len({name for name, _ in terms}) != len(terms):
        raise ValueError(f"{text!r} names a value twice")
    return tuple(terms)


def inputs_of(text: str) -> tuple[Terms, ...]:
    """The sums that a part with several inputs reads, in order. Raises ValueError."""
    return tuple(terms_of(sum_text) for sum_text in text.split(", "))


def text_of(terms: Mapping[str, float]) -> str:
    """The inverse of `terms_of`; the factors survive bit for bit."""
    return " + ".join(name if factor == 1.0 else f"{factor!r} * {name}" for name, factor in terms.items())


def text_of_inputs(inputs: Sequence[Mapping[str, float]]) -> str:
    """The inverse of `inputs_of`."""
    return ", ".join(text_of(terms) for terms in inputs)


def weighted_sum(terms: Terms, values: Mapping[str, Tensor]) -> Tensor:
    """The sum over named values, in the order of the terms."""
    total = None
    for name, factor in terms:
        value = values[name] if factor == 1.0 else values[name] * factor
        total = value if total is None else total + value
    if total is None:
        raise ValueError("a sum of nothing")
    return total
