"""Candidates for softmax attention: four projections, and what the module may do to queries and keys."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, attribute, literal, present, site_of, size
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.norm import propose_norm
from dayzero.onboard.discover import same, tensors
from dayzero.runtime.weights import Source, Stored


def propose_attention(site: Site) -> list[Candidate]:
    """All assignments of projections that the shapes allow, with every norm, rotation, window and clip in sight."""
    linears = linear_calls(site)
    output = [path for path, call in linears.items() if same(call.result, site.call.result)]
    inputs = [path for path, call in linears.items() if same(call.hidden, site.call.hidden)]
    if len(linears) != 4 or len(output) != 1 or len(inputs) != 3:
        return []
    wide = site.module.get_parameter(f"{output[0]}.weight").shape[1]
    candidates = []
    for query, key, value in itertools.permutations(inputs):
        rows = [site.module.get_parameter(f"{path}.weight").shape[0] for path in (query, key, value)]
        if rows[0] != wide or rows[1] != rows[2]:
            continue
        names = {"query": query, "key": key, "value": value, "output": output[0]}
        for head_dim in _head_dims(site, rows):
            candidates += _with_details(site, names, head_dim)
    return candidates


def _head_dims(site: Site, rows: list[int]) -> list[Evidence]:
    """Integers that could be the head size: attributes that divide the projections, or the rotary tables' width."""
    found: dict[int, Evidence] = {}
    for name, value in sorted(vars(site.module).items()):
        if isinstance(value, int) and not isinstance(value, bool) and value > 1:
            fits = all(row % value == 0 for row in rows)
            if fits and value not in found and not name.startswith("_"):
                found[value] = attribute("", name)
    tables = _tables(site)
    # The likeliest is the one that the rotary tables have; a smaller rotary width means a partial rotation.
    ordered = sorted(found.items(), key=lambda item: (bool(tables) and item[0] != tables[0].shape[-1], -item[0]))
    return [evidence for _, evidence in ordered]


def _tables(site: Site) -> list[Tensor]:
    """cos and sin, where the module is handed a pair of tables of equal shape."""
    pairs = [value for value in [*site.call.args, *site.call.kwargs.values()] if isinstance(value, tuple)]
    pairs = [pair for pair in pairs if len(pair) == 2 and all(isinstance(table, Tensor) for table in pair)]
    return list(pairs[0]) if pairs and pairs[0][0].shape == pairs[0][1].shape else []


def _with_details(site: Site, names: dict[str, str], head_dim: Evidence) -> Iterator[Candidate]:
    query, key = f"{names['query']}.weight", f"{names['key']}.weight"
    parameters: dict[str, Source] = {}
    for ours, theirs in names.items():
        parameters[f"{ours}.weight"] = Stored(f"{theirs}.weight")
        if getattr(site.module.get_submodule(theirs), "bias", None) is not None:
            parameters[f"{ours}.bias"] = Stored(f"{theirs}.bias")
    base = {
        "hidden": size(query, 1),
        "heads": _quotient(query, head_dim),
        "kv_heads": _quotient(key, head_dim),
        "head_dim": head_dim,
        "bias": present(f"{names['query']}.bias"),
        "output_bias": present(f"{names['output']}.bias"),
    }
    rotations = ["half", "interleaved", None] if _tables(site) else [None]
    options = itertools.product(
        _qk_norms(site, names, head_dim), rotations, _scales(site, head_dim), _windows(site), _clips(site)
    )
    for (norm_arguments, norm_parameters), rotary, scale, window, clip in options:
        arguments = {
            **base,
            **norm_arguments,
            "rotary": literal(rotary, "enumerated"),
            "scale": scale,
            "window": window,
            "clip": clip,
        }
        yield Candidate("GroupedQueryAttention", arguments, {**parameters, **norm_parameters})


def _quotient(parameter: str, divisor: Evidence) -> Evidence:
    return Evidence(
        f"shape of {parameter}[0] / head size",
        lambda module, config: module.get_parameter(parameter).shape[0] // divisor.resolve(module, config),
    )


def _qk_norms(
    site: Site, names: dict[str, str], head_dim: Evidence
) -> list[tuple[dict[str, Evidence], dict[str, Source]]]:
    """No norms where the module has none; otherwise both orders of its two, over a head or the whole vector."""
    vectors = [path for path, call in site.inner.items() if _is_norm(call.module) and call.has_stream]
    if not vectors:
        return [({"qk_norm": literal("none", "the module has no norms")}, {})]
    if len(vectors) != 2:
        return []
    width = head_dim.resolve(site.module, site.config)
    options = []
    for query_norm, key_norm in itertools.permutations(vectors):
        sizes = [next(site.module.get_submodule(path).parameters()).shape[0] for path in (query_norm, key_norm)]
        rows = [site.module.get_parameter(f"{names[part]}.weight").shape[0] for part in ("query", "key")]
        kind = "head" if sizes == [width, width] else "whole" if sizes == rows else None
        if kind is None:
            continue
        inner = site_of({f"n.{path}": call for path, call in site.inner.items()}, f"n.{query_norm}", site.config)
        for norm in propose_norm(inner):
            arguments = {
                "qk_norm": literal(kind, "the norms' width"),
                "qk_norm_eps": _below(query_norm, norm.arguments["eps"]),
                "qk_norm_offset": norm.arguments["offset"],
            }
            leaf = str(next(iter(inner.module.named_parameters()))[0])
            parameters: dict[str, Source] = {
                "query_norm.weight": Stored(f"{query_norm}.{leaf}"),
                "key_norm.weight": Stored(f"{key_norm}.{leaf}"),
            }
            options.append((arguments, parameters))
    return options


def _below(path: str, evidence: Evidence) -> Evidence:
    """Evidence about the child at `path`, as evidence about its parent."""
    return Evidence(
        f"{path}: {evidence.label}",
        lambda module, config: evidence.resolve(module.get_submodule(path), config),
    )


def _is_norm(module: nn.Module) -> bool:
    parameters = list(module.parameters())
    return len(parameters) == 1 and parameters[0].ndim == 1


def _scales(site: Site, head_dim: Evidence) -> list[Evidence]:
    """Constants of the trace that an attribute or field holds; head size to the power -1/2 where it is one of them."""
    found = []
    usual = Evidence("head size ** -0.5", lambda module, config: head_dim.resolve(module, config) ** -0.5)
    for value in sorted(site.operations.constants):
        if value == usual.resolve(site.module, site.config):
            found = [*(site.explain(value) or [usual])[:1], *found]
        elif 1e-3 < value < 1e3:
            found += site.explain(value)[:1]
    return [scale for scale in found if isinstance(scale.resolve(site.module, site.config), float)] or [usual]


def _windows(site: Site) -> list[Evidence]:
    """The window that the captured mask shows, none where it hides only the future."""
    none = literal(None, "the mask hides only the future")
    masks = [mask for mask in tensors((site.call.args, site.call.kwargs)) if mask.ndim == 4 and mask.shape[-1] > 1]
    if not masks:
        return [none]
    mask = masks[0][0, 0]
    visible = (mask if mask.dtype == torch.bool else mask > -1e30).sum(-1)
    widest = int(visible.max())
    if widest == mask.shape[-1]:
        return [none]
    fields = [evidence for evidence in site.explain(widest) if evidence.label.startswith("config ")]
    return fields or [literal(widest, "the mask's band")]


def _clips(site: Site) -> list[Evidence]:
    """Bounds of a clamp in the trace, and none: the clamp may be another one."""
    if "clamp" not in site.operations.steps:
        return [literal(None, "no clamp in the trace")]
    values = sorted(value for value in site.operations.constants if value > 0)
    bounds = [evidence for value in values for evidence in site.explain(value)[:1]]
    return [*bounds, literal(None, "the clamp in the trace is no clip")]
