"""Relations between the sizes of a config: which hold in it, and how a small config is brought to hold them too.

Which of them the architecture needs and which are accidents of round numbers cannot be seen from the numbers; it is
found by trying (`sizes.py`).
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Literal

Name = Any  # whatever can be a key
Values = Mapping[Name, int]
Kind = Literal["equal", "times", "multiple", "sum", "product", "same product", "at most"]
RATIOS = (2, 3, 4, 8)
# Likelier to be meant, first: an equality is rarely an accident, a divisibility among round numbers often.
_ORDER: tuple[Kind, ...] = ("equal", "sum", "at most", "product", "same product", "times", "multiple")


@dataclass(frozen=True)
class Relation:
    """names of the sizes that take part: the first is the one that the others give. factor: how many times the first
    goes into the others ("product", "same product"), or the other into the first ("times"). share: how many times the
    product goes into the first ("product")."""

    kind: Kind
    names: tuple[Name, ...]
    factor: int = 1
    share: int = 1

    def holds(self, values: Values) -> bool:
        a, *others = (values[name] for name in self.names)
        match self.kind:
            case "equal":
                return a == others[0]
            case "times":
                return a == self.factor * others[0]
            case "multiple":
                return bool(others[0]) and a % others[0] == 0
            case "sum":
                return a == sum(others)
            case "product":
                return a * self.factor == others[0] * others[1] * self.share
            case "same product":
                return a * others[0] * self.factor == others[1] * others[2]
            case "at most":
                return a <= others[0]

    def repairs(self, values: Values) -> Iterator[dict[Name, int]]:
        """Changes of one size that make it hold."""
        first, *rest = self.names
        a, *others = (values[name] for name in self.names)
        b = others[0]
        match self.kind:
            case "equal":
                yield {rest[0]: a}
                yield {first: b}
            case "times":
                yield {first: self.factor * b}
                if a % self.factor == 0:
                    yield {rest[0]: a // self.factor}
            case "multiple":
                for change in (-(a % b), b - a % b, 2 * b - a % b) if b else ():
                    if a + change > 0:
                        yield {first: a + change}
                for divisor in range(min(a // 2, 2 * b), 1, -1):
                    if a % divisor == 0:
                        yield {rest[0]: divisor}
            case "sum":
                yield {first: sum(others)}
                for name, other in zip(rest, others, strict=True):
                    if a > sum(others) - other:
                        yield {name: a - (sum(others) - other)}
            case "product":
                whole, product = a * self.factor, others[0] * others[1] * self.share
                if product % self.factor == 0:
                    yield {first: product // self.factor}
                for name, other in ((rest[0], others[1] * self.share), (rest[1], others[0] * self.share)):
                    if other and whole % other == 0:
                        yield {name: whole // other}
            case "same product":
                left, right = a * b * self.factor, others[1] * others[2]
                for name, other in ((rest[1], others[2]), (rest[2], others[1])):
                    if other and left % other == 0:
                        yield {name: left // other}
                for name, other in ((first, b), (rest[0], a)):
                    if other and right % (other * self.factor) == 0:
                        yield {name: right // (other * self.factor)}
            case "at most":
                yield {first: b}
                yield {first: max(1, b // 2)}
                yield {rest[0]: a}


def relations(values: Values) -> list[Relation]:
    """Those that hold between sizes of at least 2 (counts of at least 1 for "at most"), likeliest first."""
    held = {name: value for name, value in values.items() if value > 1}
    found: list[Relation] = []
    for one, other in combinations(held, 2):
        a, b = held[one], held[other]
        if a == b:
            found.append(Relation("equal", (one, other)))
        large, small = (one, other) if a > b else (other, one)
        if a != b:
            found.append(Relation("at most", (small, large)))
        if held[large] % held[small] == 0:
            found.append(Relation("multiple", (large, small)))
            ratio = held[large] // held[small]
            if ratio in RATIOS:
                found.append(Relation("times", (large, small), ratio))
        for third in held:
            c = held[third]
            if third in (one, other):
                continue
            if c == a + b:
                found.append(Relation("sum", (third, one, other)))
            for factor in (1, *RATIOS):
                if c * factor == a * b and c not in (a, b):
                    found.append(Relation("product", (third, one, other), factor))
                if factor > 1 and c == a * b * factor:
                    found.append(Relation("product", (third, one, other), share=factor))
    found += _same_products(held)
    return sorted(found, key=lambda relation: (_ORDER.index(relation.kind), _distance(relation)))


def _same_products(held: Values) -> Iterator[Relation]:
    """k * a * b == c * d with four different sizes, no two of them equal across."""
    products: dict[int, list[tuple[Name, Name]]] = {}
    for one, other in combinations(held, 2):
        products.setdefault(held[one] * held[other], []).append((one, other))
    for product, pairs in products.items():
        for factor in (1, 2, 4):
            for pair in pairs:
                for two in products.get(product * factor, ()):
                    if two is pair or set(pair) & set(two) or {held[n] for n in pair} & {held[n] for n in two}:
                        continue
                    if factor > 1 or str(pair) < str(two):
                        yield Relation("same product", (*pair, *two), factor)


def _distance(relation: Relation) -> float:
    """How little the names of the sizes have in common, 0 to 1: sizes of one part are often named alike."""
    words = [set(re.findall(r"[a-z]+|\d+", str(name).lower())) for name in relation.names]
    shared = [len(one & other) / max(1, len(one | other)) for one, other in combinations(words, 2)]
    return 1 - sum(shared) / len(shared)
