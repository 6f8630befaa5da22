"""How the parts of a layer are wired: each reads a sum of what stands before it, written as "x + 0.22 * mixer"."""

from collections.abc import Mapping

from torch import Tensor

Terms = tuple[tuple[str, float], ...]


def terms_of(text: str) -> Terms:
    """("x", 1.0), ("mixer", 0.22) for "x + 0.22 * mixer". Raises ValueError for anything else than such a sum."""
    terms = []
    for term in text.replace(" - ", " + -1.0 * ").split(" + "):
        factor, star, name = term.rpartition(" * ")
        if not name.isidentifier():
            raise ValueError(f"{text!r} is not a sum of named values, such as 'x + 0.5 * mixer'")
        terms.append((name, float(factor) if star else 1.0))
    if len({name for name, _ in terms}) != len(terms):
        raise ValueError(f"{text!r} names a value twice")
    return tuple(terms)


def text_of(terms: Mapping[str, float]) -> str:
    """The inverse of `terms_of`; the factors survive bit for bit."""
    return " + ".join(name if factor == 1.0 else f"{factor!r} * {name}" for name, factor in terms.items())


def weighted_sum(terms: Terms, values: Mapping[str, Tensor]) -> Tensor:
    """The sum over named values, in the order of the terms."""
    total = None
    for name, factor in terms:
        value = values[name] if factor == 1.0 else values[name] * factor
        total = value if total is None else total + value
    if total is None:
        raise ValueError("a sum of nothing")
    return total
