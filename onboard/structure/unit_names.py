"""Names of a layer's units, by what they do and what they feed: `mixer`, `ffn_norm`, `mixer_post_norm`."""

from collections.abc import Mapping
from dataclasses import replace

from dayzero.onboard.structure.units import LayerParts, Unit
from dayzero.runtime.nn.loop import MESSAGE
from dayzero.runtime.nn.wiring import PAST


def named(parts: LayerParts) -> LayerParts:
    """Names by role: mixer, ffn; a norm or a join is named after the one part it feeds, or else the one it follows.

    Feed-forward parts may mix tokens too, by a shift or by a limit on how many an expert takes: of several mixers in
    turn, the last is the ffn of a layer that has no other."""
    role_of = {unit.name: unit.role for unit in parts.units}
    names: dict[str, str] = {"x": "x", PAST: PAST, MESSAGE: MESSAGE}

    def add(old: str, stem: str) -> None:
        taken, number, name = set(names.values()), 2, stem
        while name in taken:
            name, number = f"{stem}_{number}", number + 1
        names[old] = name

    def renamed(terms: Mapping[str, float]) -> dict[str, float]:
        pairs = ((name.partition("#"), factor) for name, factor in terms.items())
        return {f"{names[name]}.{number}" if mark else names[name]: f for (name, mark, number), f in pairs}

    def feeds(name: str) -> str | None:
        """The mixer or feed-forward part that alone reads the value, directly or through one norm."""
        readers = [unit for unit in parts.units if any(name in terms for terms in unit.inputs)]
        if name in parts.gives or len(readers) != 1 or [name] not in [list(terms) for terms in readers[0].inputs]:
            return None
        if readers[0].role in {"mixer", "cross", "ffn"}:
            return readers[0].name
        return feeds(readers[0].name) if readers[0].role == "norm" else None

    last = _last_in_turn(parts.units)
    for unit in parts.units:
        if unit.role in {"mixer", "cross", "ffn", "projection", "routing"}:
            add(unit.name, "ffn" if unit.name == last else unit.role)
        if unit.role == "chain":
            add(unit.name, "gated_input")
    for unit in parts.units:
        if unit.role == "norm":
            readers = [u for u in parts.units if any(unit.name in terms for terms in u.inputs)]
            source = next(iter(unit.reads)).partition("#")[0] if len(unit.reads) == 1 else "x"
            alone = len(readers) == 1 and any(list(terms) == [unit.name] for terms in readers[0].inputs)
            if alone and readers[0].role in {"mixer", "cross", "ffn"}:
                add(unit.name, f"{names[readers[0].name]}_norm")
            elif role_of.get(source) in {"mixer", "cross", "ffn", "chain"}:
                add(unit.name, f"{names[source]}_post_norm")
            else:
                add(unit.name, "norm")
        elif unit.role in {"join", "beside"}:
            fed = feeds(unit.name)
            add(unit.name, "residual" if fed is None else f"{names[fed]}_input")
        elif unit.role == "scale":
            source = next(iter(unit.reads))
            add(unit.name, f"{'residual' if source == 'x' else names.get(source, 'value')}_scale")
    units = [
        replace(
            unit,
            name=names[unit.name],
            reads=renamed(unit.reads),
            more=[renamed(terms) for terms in unit.more],
            after=tuple(names[name] for name in unit.after),
        )
        for unit in parts.units
    ]
    return LayerParts(units, renamed(parts.gives), parts.keeps)


def _last_in_turn(units: list[Unit]) -> str | None:
    """The last mixer, where it reads what an earlier one gave and nothing else in the layer is a feed-forward part."""
    mixers = [unit.name for unit in units if unit.role == "mixer"]
    if len(mixers) < 2 or any(unit.role == "ffn" for unit in units):
        return None
    after: set[str] = set(mixers[:-1])
    for unit in units:
        if any(name.partition("#")[0] in after for terms in unit.inputs for name in terms):
            after.add(unit.name)
    read_later = next(unit for unit in units if unit.name == mixers[-1])
    return mixers[-1] if any(name.partition("#")[0] in after for terms in read_later.inputs for name in terms) else None
