"""Where a number of the trace is held: the attributes and fields that have its value, likeliest first."""

import contextlib
from dataclasses import replace

from dayzero.onboard.candidates.evidence import Evidence, Site, literal


def held(site: Site, value: float, kind: type, handed: bool = False) -> list[Evidence]:
    """Every attribute and field that holds this value as this kind of number and can be read by itself."""
    found = []
    for evidence in site.explain(value, handed):
        with contextlib.suppress(Exception):  # a config may refuse to say what differs from layer to layer
            if type(evidence.resolve(site.module, site.config)) is kind:
                found.append(evidence)
    return found


def named(site: Site, value: int, words: tuple[str, ...]) -> Evidence | None:
    """The likeliest attribute or field with this whole number: one with an early word, the module's own first."""
    found = sorted(held(site, value, int), key=lambda evidence: rank(evidence, words))
    return found[0] if found else None


def any_number(site: Site, value: float, words: tuple[str, ...]) -> Evidence:
    """The likeliest attribute or field with this value; the value itself where nothing holds it."""
    found = [*held(site, value, float), *held(site, value, int)]
    found.sort(key=lambda evidence: rank(evidence, words))
    return found[0] if found else literal(value, "constant in the trace")


def constant(site: Site, measured: float) -> float | None:
    """The constant of the trace that a measured value is."""
    near = [c for c in site.operations.constants if abs(c - measured) <= 1e-7 * abs(measured)]
    return min(near, key=lambda c: abs(c - measured)) if near else None


def rank(evidence: Evidence, words: tuple[str, ...]) -> tuple[int, int]:
    """Order only: the module's own attributes, then fields, then children's; those with an early word first."""
    label = evidence.label
    place = 0 if label.startswith("attribute ") and "." not in label else 1 if label.startswith("config ") else 2
    word = next((number for number, word in enumerate(words) if word in label), len(words))
    return word, place


def divided(evidence: Evidence, divisor: Evidence) -> Evidence:
    return Evidence(
        f"{evidence.label} / {divisor.label}",
        lambda module, config: evidence.resolve(module, config) // divisor.resolve(module, config),
    )


def as_float(evidence: Evidence) -> Evidence:
    return replace(evidence, resolve=lambda module, config: float(evidence.resolve(module, config)))
