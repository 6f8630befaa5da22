"""Candidates for latent attention, found by what flows: projections down to a normed latent and up again from it."""

import itertools
from collections.abc import Iterator
from typing import Any, get_args

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal, present, size
from dayzero.onboard.candidates.indexer import propose_indexers
from dayzero.onboard.candidates.latent_projections import (
    Chain,
    Parts,
    Sizes,
    assignments_of,
    chains_of,
    columns,
    inside,
    is_norm,
    rows,
    selectors,
    sizes_of,
)
from dayzero.onboard.candidates.norm import epsilons
from dayzero.onboard.candidates.stops import Stop
from dayzero.onboard.oracle.calls import Call, same, tensors
from dayzero.onboard.structure.handed import handed_tables
from dayzero.onboard.structure.left import handed_index, handed_latents
from dayzero.runtime.nn.latent_attention import LatentRotary
from dayzero.runtime.weights import Concat, Part, Source, Stored


def propose_latent_attention(site: Site) -> list[Candidate]:
    """All assignments of projections to roles that the shapes allow, with every detail in sight."""
    if site.call.hidden.ndim != 3:
        return []
    hidden, result = site.call.hidden, site.call.result
    indexers = selectors(site)
    own = {path: call for path, call in site.inner.items() if not inside(path, indexers)}
    linears = {path: call for path, call in own.items() if isinstance(call.module, nn.Linear)}
    outputs = [path for path, call in linears.items() if same(call.result, result) and not same(call.hidden, hidden)]
    if len(outputs) != 1 or len(indexers) > 1:
        return []
    inputs = [path for path, call in linears.items() if same(call.hidden, hidden)]
    norms = {path: call for path, call in own.items() if is_norm(call)}
    chains = list(chains_of(linears, norms, inputs, outputs[0]))
    candidates = []
    for parts in assignments_of(site, linears, chains, inputs, outputs[0]):
        for sizes in sizes_of(site, parts):
            candidates += _with_details(site, parts, sizes, norms, indexers)
    return candidates


def _with_details(
    site: Site, parts: Parts, sizes: Sizes, norms: dict[str, Call], indexers: list[str]
) -> Iterator[Candidate]:
    heads = sizes.heads.resolve(site.module, site.config)
    query_path = parts.query.up if isinstance(parts.query, Chain) else parts.query
    fused = rows(site, query_path) // heads - sizes.nope - sizes.rope
    arguments = _shapes(site, parts, sizes, fused)
    parameters = _projections(parts, sizes, fused, heads)
    biased = {name: path for name, path in (("query_down", _down(parts.query)), ("kv_down", _down(parts.kv))) if path}
    if biased:
        arguments["latent_bias"] = present(f"{biased.get('kv_down', biased.get('query_down'))}.bias")
    biased = {name: path for name, path in biased.items() if _has_bias(site, path)}
    arguments["output_bias"] = present(f"{parts.output}.bias")
    for name, path in {**biased, **({"output": parts.output} if _has_bias(site, parts.output) else {})}.items():
        parameters[f"{name}.bias"] = Stored(f"{path}.bias")
    sinks = [name for name, p in site.module.named_parameters(recurse=False) if tuple(p.shape) == (heads,)]
    if len(sinks) > 1:
        return
    if sinks:
        arguments["sinks"] = present(sinks[0])
        parameters["sinks"] = Stored(sinks[0])
    key_norms, exchanges = _key_norms(site, parts, sizes, norms), _exchanges(site, parts)
    selections = _selections(site, parts, indexers)
    if site.stops is not None and not (key_norms and selections and exchanges):
        chosen = tuple(name for name, _ in site.module.named_parameters() if inside(name, indexers))
        left = tuple(f"{path}.weight" for path in norms) if not key_norms else ()
        without = {"what its indexer chooses": chosen} if not selections else {}
        without |= {"one of its norms": left} if left else {}
        without |= {"latents that layers hand on": ()} if not exchanges else {}
        site.stops.append(Stop("LatentAttention", without, "".join(indexers) if key_norms and exchanges else ""))
    options = itertools.product(
        key_norms,
        _rotations(site, sizes),
        held_scales(site, sizes.nope + sizes.rope),
        _latent_scales(site, parts),
        _position_scales(site, heads, indexers),
        selections,
        exchanges,
    )
    for (key_norm, key_norm_source), rotary, scale, scales, position, selection, (exchange, rotaries) in options:
        if rotary["rotary"].resolve(site.module, site.config) not in rotaries:
            continue
        if scale.label in {evidence.label for evidence in scales.values()}:
            continue  # one constant has one use
        yield Candidate(
            "LatentAttention",
            {
                **arguments,
                **key_norm,
                **rotary,
                "scale": scale,
                **scales,
                **position[0],
                **selection,
                **exchange,
                "window": window_of(site),
            },
            {**parameters, **key_norm_source, **position[1]},
        )


def _down(part: Chain | str | None) -> str | None:
    return part.down if isinstance(part, Chain) else None


def _has_bias(site: Site, path: str) -> bool:
    return getattr(site.module.get_submodule(path), "bias", None) is not None


def _shapes(site: Site, parts: Parts, sizes: Sizes, fused: int) -> dict[str, Evidence]:
    """Arguments that shapes give, each a formula over the same parameters of any other model."""
    heads, output, up = sizes.heads, f"{parts.output}.weight", f"{parts.kv_up}.weight"
    query = f"{parts.query.up if isinstance(parts.query, Chain) else parts.query}.weight"

    def value(module: nn.Module, config: Any) -> int:
        return module.get_parameter(output).shape[1] // heads.resolve(module, config)

    def nope(module: nn.Module, config: Any) -> int:
        return module.get_parameter(up).shape[0] // heads.resolve(module, config) - value(module, config)

    def rope(module: nn.Module, config: Any) -> int:
        width = module.get_parameter(query).shape[0] // heads.resolve(module, config)
        return width - nope(module, config) - (value(module, config) if fused else 0)

    found = {
        "hidden": size(output, 0),
        "heads": heads,
        "nope_dim": Evidence(f"rows of {up} a head, less the value's", nope),
        "rope_dim": Evidence(f"rows of {query} a head, less the rest", rope),
        "value_dim": Evidence(f"columns of {output} a head", value),
        "kv_rank": size(up, 1),
    }
    if isinstance(parts.query, Chain):
        found["query_rank"] = size(f"{parts.query.down}.weight", 0)
        found["query_norm_eps"] = _eps(site, parts.query.norm)
        if parts.query.both:
            found["query_from"] = literal("both", "the projection reads the latent before and after its norm")
    if parts.kv is not None:
        found["kv_norm_eps"] = _eps(site, parts.kv.norm)
    if fused:
        found["gate"] = literal("element", "the query projection has rows for values, too")
        found["gate_from"] = literal("query", "the query projection has rows for values, too")
    elif parts.gate is not None:
        wide = f"{parts.gate}.weight"

        def gate(module: nn.Module, config: Any) -> str:
            return "head" if module.get_parameter(wide).shape[0] == heads.resolve(module, config) else "element"

        found["gate"] = Evidence(f"rows of {wide}", gate)
    return found


def _projections(parts: Parts, sizes: Sizes, fused: int, heads: int) -> dict[str, Source]:
    found: dict[str, Source] = {
        "kv_up.weight": Stored(f"{parts.kv_up}.weight"),
        "output.weight": Stored(f"{parts.output}.weight"),
    }
    if isinstance(parts.query, Chain):
        found["query_down.weight"] = Stored(f"{parts.query.down}.weight")
        found["query_norm.weight"] = Stored(f"{parts.query.norm}.weight")
    query = Stored(f"{parts.query.up if isinstance(parts.query, Chain) else parts.query}.weight")
    width = sizes.nope + sizes.rope
    if fused:
        found["query_up.weight"] = Part(0, 0, width, query, heads)
        found["gate.weight"] = Part(0, width, width + sizes.value, query, heads)
    else:
        found["query_up.weight"] = query
    if parts.gate is not None:
        found["gate.weight"] = Stored(f"{parts.gate}.weight")
    if parts.kv is not None:
        down: Source = Stored(f"{parts.kv.down}.weight")
        if parts.rope_key is not None:
            down = Concat(0, (down, Stored(f"{parts.rope_key}.weight")))  # type: ignore[arg-type]
        found["kv_down.weight"] = down
        found["kv_norm.weight"] = Stored(f"{parts.kv.norm}.weight")
    return found


def _eps(site: Site, norm: str) -> Evidence:
    """The small constant of the norm's own trace."""
    found = epsilons(Site(site.inner[norm], {}, site.config))
    if not found:
        return literal(0.0, f"{norm} adds nothing")
    inner = found[0]
    return Evidence(f"{norm}: {inner.label}", lambda m, c: inner.resolve(m.get_submodule(norm), c))


def _key_norms(
    site: Site, parts: Parts, sizes: Sizes, norms: dict[str, Call]
) -> list[tuple[dict[str, Evidence], dict[str, Source]]]:
    """The norm of the turned key part, where a norm is left that is as wide."""
    used = {part.norm for part in (parts.query, parts.kv) if isinstance(part, Chain)}
    left = [path for path in norms if path not in used]
    if not left:
        return [({}, {})]
    if len(left) > 1 or norms[left[0]].hidden.shape[-1] != sizes.rope:
        return []
    return [({"key_norm_eps": _eps(site, left[0])}, {"key_norm.weight": Stored(f"{left[0]}.weight")})]


def _rotations(site: Site, sizes: Sizes) -> list[dict[str, Evidence]]:
    tables = handed_tables(site.call, site.inner)
    fit = [number for number, table in enumerate(tables) if 2 * table.cos.shape[-1] == sizes.rope]
    styles: tuple[LatentRotary, ...] = get_args(LatentRotary)
    turned = [
        {"rotary": literal(style, "enumerated"), "table": literal(number, "the table as wide as the turned part")}
        for number, style in itertools.product(fit, styles)
    ]
    return [*turned, {"rotary": literal(None, "enumerated")}]


def held_scales(site: Site, width: int) -> list[Evidence]:
    """Constants of the trace that the module holds, and the width of a query to the power -1/2."""
    usual = width**-0.5
    found = [e for value in sorted(site.operations.constants) for e in _held(site, value) if 1e-3 < value < 1e3]
    found.sort(key=lambda e: e.resolve(site.module, site.config) != usual)
    return found or [literal(usual, "width of a query ** -0.5")]


def _held(site: Site, value: float) -> list[Evidence]:
    """The module's own attribute that holds a fractional constant."""
    if float(value).is_integer():
        return []
    return [e for e in site.explain(value) if e.label.startswith("attribute ") and "." not in e.label][:1]


def _latent_scales(site: Site, parts: Parts) -> list[dict[str, Evidence]]:
    """Factors of the latents: seen where the projection reads the scaled one; else any that the module holds, for a
    factor may as well follow the projection."""
    options = []
    for name, part in (("query_scale", parts.query), ("kv_scale", parts.kv)):
        if not isinstance(part, Chain):
            options.append([{}])
        elif abs(part.scale - 1.0) > 1e-12:
            near = [v for v in site.operations.constants if abs(v - part.scale) <= 1e-12 * part.scale]
            options.append([{name: (_all_held(site, near[0]) if near else []) or literal(part.scale, "seen")}])
            if isinstance(options[-1][0][name], list):
                options[-1] = [{name: e} for e in options[-1][0][name]]
        else:
            held = [e for value in sorted(site.operations.constants) if value > 1e-3 for e in _all_held(site, value)]
            options.append([{}, *({name: e} for e in held)])
    return [{**query, **kv} for query, kv in itertools.product(*options)]


def _all_held(site: Site, value: float) -> list[Evidence]:
    found = site.explain(value)
    return [
        e
        for e in found
        if e.label.startswith("attribute ")
        and "." not in e.label
        and isinstance(e.resolve(site.module, site.config), float)
    ]


def _position_scales(
    site: Site, heads: int, indexers: list[str]
) -> list[tuple[dict[str, Evidence], dict[str, Source]]]:
    """None; steps of a logarithm, where the trace has both; or a function that each head learns."""
    learned = [
        path
        for path, call in site.inner.items()
        if not inside(path, indexers)
        and call.has_stream
        and call.hidden.shape == call.result.shape
        and [tuple(p.shape) for p in call.module.parameters()] == [(heads,), (heads,)]
    ]
    if learned:
        names = [f"{learned[0]}.{name}" for name, _ in site.module.get_submodule(learned[0]).named_parameters()]
        argument = {"learned_position_scale": literal(True, f"{learned[0]} has two numbers a head")}
        return [
            (argument, {"query_position.scale": Stored(a), "query_position.bias": Stored(b)})
            for a, b in itertools.permutations(names)
        ]
    plain: list[tuple[dict[str, Evidence], dict[str, Source]]] = [({}, {})]
    if not {"log", "floor"} <= site.operations.steps:
        return plain
    nested = _nested_fields(site.config)
    constants = [value for value in site.operations.constants if value > 1e-9]
    steps = [e for value, e in nested if value in constants and isinstance(value, int) and value > 1]
    floats = [(value, e) for value, e in nested if isinstance(value, float)]
    # A factor of 1 leaves no constant.
    betas = [e for value, e in floats if value in constants] or [e for value, e in floats if value == 1]
    found = [({"position_scale": beta, "position_step": step}, {}) for step, beta in itertools.product(steps, betas)]
    return [*found, *plain]


def _nested_fields(config: Any) -> list[tuple[Any, Evidence]]:
    """Numbers of the config, those inside its dicts first, with where they are."""

    def read(path: tuple[str, ...]) -> Evidence:
        def resolve(module: nn.Module, config: Any) -> Any:
            held = getattr(config, path[0], None)
            for name in path[1:]:
                held = held.get(name) if isinstance(held, dict) else None
            return held

        return Evidence("config " + ".".join(path), resolve)

    found = []
    plain = sorted(config.to_dict().items())
    for name, value in plain:
        if isinstance(value, dict):
            numbers = ((inner, held) for inner, held in sorted(value.items()) if isinstance(held, (int, float)))
            found += [(held, read((name, inner))) for inner, held in numbers if not isinstance(held, bool)]
    found += [
        (value, read((name,)))
        for name, value in plain
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    ]
    return found


def _selections(site: Site, parts: Parts, indexers: list[str]) -> list[dict[str, Evidence | Candidate]]:
    """What the layer attends to: everything, what an indexer of its own chooses, or what an earlier one chose."""
    if indexers:
        latent = None
        if isinstance(parts.query, Chain):
            latent = site.inner[parts.query.norm].result * parts.query.scale
        made = tensors(site.inner[indexers[0]].output)[0]
        found: list[dict[str, Evidence | Candidate]] = [
            {"indexer": found} for found in propose_indexers(site, indexers[0], latent)
        ]
        return [{**selection, **unseeing} for selection in found for unseeing in _unseeing(made)]
    if (index := handed_index(site.call)) is not None:
        why = "the layer is handed a selection and has nothing to make one with"
        return [{"selection_from_earlier": literal(True, why), **unseeing} for unseeing in _unseeing(index)]
    return [{}]


def _unseeing(index: Tensor) -> list[dict[str, Evidence]]:
    """What tokens attend to that nothing was chosen for, where there are such."""
    if index.dtype == torch.bool or not bool((index < 0).all(-1).any()):
        return [{}]
    return [{}, {"unseeing": literal("all", "tokens that nothing was chosen for")}]


def _exchanges(site: Site, parts: Parts) -> list[tuple[dict[str, Evidence], tuple[str | None, ...]]]:
    """Latents that the layer takes from an earlier one or leaves for later ones, and the rotations to tell apart: where
    channels come to lie is seen in what layers exchange, and nowhere else."""
    handed = handed_latents(site.call)
    if parts.kv is None:
        rank = columns(site, parts.kv_up)
        fit = [name for name, (first, second) in handed.items() if first.shape[-1] == rank]
        styles = (*get_args(LatentRotary), None)
        return [({"takes": literal(name, "handed to the layer")}, styles) for name in fit]
    normed = site.inner[parts.kv.norm].result * parts.kv.scale
    left = [name for name, (first, _) in handed_latents(site.call, after=True).items() if same(first, normed)]
    if left:
        exact = ("half", "deinterleaved", None)
        return [({"leaves": literal(left[0], "found in what the layer is handed, after it ran")}, exact)]
    return [({}, ("interleaved", "half", None))]


def window_of(site: Site) -> Evidence:
    """The window that the captured mask shows, None where it hides only the future."""
    none = literal(None, "the mask hides only the future")
    masks = [mask for mask in tensors((site.call.args, site.call.kwargs)) if mask.ndim == 4 and mask.shape[-1] > 1]
    masks = [mask for mask in masks if mask.shape[-1] == mask.shape[-2]]
    if not masks:
        return none
    mask = masks[0][0, 0]
    visible = (mask if mask.dtype == torch.bool else mask > -1e30).sum(-1)
    widest = int(visible.max())
    if widest == mask.shape[-1]:
        return none
    found = site.explain(widest, handed=True)
    return ([e for e in found if "window" in e.label] or found or [literal(widest, "the mask's band")])[0]
