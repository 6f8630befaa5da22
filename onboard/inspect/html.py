"""The picture of a checkpoint: one file without references to others."""

import math
from pathlib import Path
from typing import Any

import jinja2

import dayzero.templates
from dayzero.onboard.inspect.ledger import Ledger
from dayzero.onboard.inspect.tensor_names import counted, stepped
from dayzero.onboard.readable import readable_bytes, readable_count, share

_COLOURS = ("blue", "teal", "amber", "violet", "green", "red")
_WIDTH, _LABEL = 960, 190  # of the strips, in the picture's units
_MOST_CELLS = 2048


def render_inspection(title: str, ledger: Ledger) -> str:
    """HTML. Everything that comes from the checkpoint is escaped."""
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(dayzero.templates.__path__[0]) / "report"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"bytes": readable_bytes, "big": readable_count, "stepped": lambda t: stepped(counted(t))}
    budget = _budget(ledger)
    return environment.get_template("inspect.html.j2").render(
        title=title,
        ledger=ledger,
        dtypes=sorted({group.dtype for group in ledger.groups}),
        strips=_strips(ledger),
        last_layer=max((layer for run in ledger.layers for layer in counted(run.layers)), default=0),
        budget=budget,
        area=_area(ledger, budget),
        maths=_by_value(ledger.maths_config),
        groups=[group for group in ledger.groups if group.part_of is None],
        width=_WIDTH,
        label=_LABEL,
    )


def _by_value(fields: dict[str, str]) -> dict[str, list[str]]:
    made: dict[str, list[str]] = {}
    for field, what in fields.items():
        made.setdefault(what, []).append(field)
    return made


def _strips(ledger: Ledger) -> list[dict[str, Any]]:
    """One strip for each mixer, then one for each feed-forward: a cell where a layer is of that kind."""
    last = max((layer for run in ledger.layers for layer in counted(run.layers)), default=0)
    if last > _MOST_CELLS:  # more than a picture can show
        return []
    step = (_WIDTH - _LABEL) / (last + 1)
    made: list[dict[str, Any]] = []
    for part in ("mixer", "ffn", "residual"):
        kinds: dict[str, list[int]] = {}
        for run in ledger.layers:
            kinds.setdefault(getattr(run, part), []).extend(counted(run.layers))
        if part == "residual" and set(kinds) <= {"plain"}:
            continue
        for kind, layers in kinds.items():
            made.append(
                {
                    "kind": kind,
                    "part": {"mixer": "mixer", "ffn": "feed-forward", "residual": "residual"}[part],
                    "count": len(layers),
                    "layers": stepped(sorted(layers)),
                    "colour": _COLOURS[len(made) % len(_COLOURS)],
                    "cells": [(f"{_LABEL + layer * step:.2f}", layer) for layer in sorted(layers)],
                    "w": f"{max(step - min(1.5, step / 4), 0.4):.2f}",
                }
            )
    return made


def _budget(ledger: Ledger) -> list[dict[str, Any]]:
    made = []
    for number, (name, line) in enumerate(ledger.budget().items()):
        parameters, size = line["parameters"], line["bytes"]
        made.append(
            {
                "name": name,
                "parameters": parameters,
                "bytes": size,
                "share": share(parameters, ledger.parameters),
                "bytes_share": share(size, ledger.bytes),
                "w": f"{100 * parameters / (ledger.parameters or 1):.3f}",
                "bytes_w": f"{100 * size / (ledger.bytes or 1):.3f}",
                "colour": _COLOURS[number] if number < len(_COLOURS) else "soft",
            }
        )
    return made


def _area(ledger: Ledger, budget: list[dict[str, Any]]) -> dict[str, Any]:
    """All parameters as one area. Routed experts are a grid with one cell an expert, those of one token filled; the
    rest is stacked beside it."""
    height, total = 200.0, ledger.parameters or 1
    routed = next((line for line in budget if line["name"] == "routed experts"), None)
    wide = _WIDTH * routed["parameters"] / total if routed else 0.0
    rest, y = [], 0.0
    other = total - (routed["parameters"] if routed else 0) or 1
    for line in budget:
        if line is routed:
            continue
        tall = height * line["parameters"] / other
        rest.append({**line, "x": f"{wide:.2f}", "y": f"{y:.2f}", "width": f"{_WIDTH - wide:.2f}", "h": f"{tall:.2f}"})
        y += tall
    cells = []
    count = ledger.experts.count
    if routed and 0 < count <= _MOST_CELLS and wide > 40:
        squares = math.sqrt(count * height / wide)  # rows of square cells; of the numbers that divide, the nearest
        rows = min((n for n in range(1, count + 1) if count % n == 0), key=lambda n: abs(math.log(n / squares)))
        columns = count // rows
        w, h = wide / columns, height / rows
        cells = [
            {
                "x": f"{(expert // rows) * w:.2f}",
                "y": f"{(expert % rows) * h:.2f}",
                "w": f"{max(w - 1, w * 0.8):.2f}",
                "h": f"{max(h - 1, h * 0.8):.2f}",
                "used": expert < ledger.experts.top_k,
            }
            for expert in range(count)
        ]
    return {"height": height, "routed": routed, "routed_width": f"{wide:.2f}", "cells": cells, "rest": rest}
