"""Candidates for attention with one head of keys that are values, a low-rank blockwise output, and compressed keys."""

import itertools
from collections.abc import Iterator
from typing import Any

from torch import nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal, size
from dayzero.onboard.candidates.indexer import SeenNorm, number_evidence, seen_norms
from dayzero.onboard.candidates.latent_attention import held_scales, window_of
from dayzero.onboard.candidates.latent_projections import inside, selectors
from dayzero.onboard.candidates.norm import epsilons
from dayzero.onboard.oracle.calls import Call, same, tensors
from dayzero.runtime.weights import Source, Stored


def propose_compressed_attention(site: Site) -> list[Candidate]:
    """Found by what flows: hidden -> query latent -> heads, hidden -> normed key, two projections after the heads."""
    hidden = site.call.hidden
    if hidden.ndim != 3:
        return []
    compressors = _compressors(site)
    own = {path: call for path, call in site.inner.items() if not inside(path, compressors)}
    matrices = {path: call for path, call in own.items() if _is_matrix(call)}
    norms = {norm.path: norm for norm in seen_norms(site, own)}
    inputs = [path for path, call in matrices.items() if same(call.hidden, hidden)]
    outputs = [path for path, call in matrices.items() if same(call.result, site.call.result)]
    if len(matrices) != 5 or len(inputs) != 2 or len(outputs) != 1 or len(norms) != 2 or len(compressors) > 1:
        return []
    found: list[Candidate] = []
    for down, key in itertools.permutations(inputs):
        by_input = {n: norm for n, norm in norms.items() if same(own[n].hidden, matrices[down].result)}
        of_key = {n: norm for n, norm in norms.items() if same(own[n].hidden, matrices[key].result)}
        if len(by_input) != 1 or len(of_key) != 1:
            continue
        (query_norm,), (key_norm,) = by_input.values(), of_key.values()
        rest = [path for path in matrices if path not in (down, key, outputs[0])]
        ups = [path for path in rest if same(matrices[path].hidden, own[query_norm.path].result)]
        narrow = [path for path in rest if path not in ups]
        if len(ups) == 1 and len(narrow) == 1:
            names = {"down": down, "up": ups[0], "key": key, "narrow": narrow[0], "output": outputs[0]}
            found += _with_details(site, names, query_norm, key_norm, compressors)
    return found


def _is_matrix(call: Call) -> bool:
    parameters = list(call.module.parameters())
    return call.has_stream and len(parameters) == 1 and parameters[0].ndim == 2 and not list(call.module.children())


def _compressors(site: Site) -> list[str]:
    """Modules inside that give entries [B, 1, W, D], fewer than there are tokens, from the layer's own input."""
    batch, length = site.call.hidden.shape[:2]
    found = []
    for path, call in site.inner.items():
        entries = tensors(call.output)[:1]
        matrices = [p for p in call.module.parameters(recurse=False) if p.ndim == 2]
        if len(entries) != 1 or len(matrices) != 1 or not entries[0].is_floating_point():
            continue
        if entries[0].ndim == 4 and entries[0].shape[:2] == (batch, 1) and entries[0].shape[2] < length:
            found.append(path)
    return [path for path in found if not inside(path, [other for other in found if other != path])]


def _with_details(
    site: Site, names: dict[str, str], query_norm: SeenNorm, key_norm: SeenNorm, compressors: list[str]
) -> Iterator[Candidate]:
    up, key, narrow, output = (f"{names[part]}.weight" for part in ("up", "key", "narrow", "output"))

    def heads(module: nn.Module, config: Any) -> int:
        return module.get_parameter(up).shape[0] // module.get_parameter(key).shape[0]

    def groups(module: nn.Module, config: Any) -> int:
        return module.get_parameter(up).shape[0] // module.get_parameter(narrow).shape[1]

    def rank(module: nn.Module, config: Any) -> int:
        return module.get_parameter(narrow).shape[0] // groups(module, config)

    width = site.module.get_parameter(key).shape[0]
    wide = site.module.get_parameter(up).shape[0]
    if wide % width or wide % site.module.get_parameter(narrow).shape[1]:
        return
    count = heads(site.module, site.config)
    arguments: dict[str, Evidence | Candidate] = {
        "hidden": size(output, 0),
        "heads": Evidence(f"rows of {up} / rows of {key}", heads),
        "head_dim": size(key, 0),
        "query_rank": size(up, 1),
        "groups": Evidence(f"rows of {up} / columns of {narrow}", groups),
        "output_rank": Evidence(f"rows of {narrow} a group", rank),
        "query_norm_eps": query_norm.eps,
        "key_norm_eps": key_norm.eps,
        "window": window_of(site),
    }
    parameters: dict[str, Source] = {
        "query_down.weight": Stored(f"{names['down']}.weight"),
        "query_norm.weight": Stored(f"{query_norm.path}.{query_norm.weight}"),
        "query_up.weight": Stored(up),
        "key.weight": Stored(key),
        "key_norm.weight": Stored(f"{key_norm.path}.{key_norm.weight}"),
        "output_down.weight": Stored(narrow),
        "output.weight": Stored(output),
    }
    sinks = [name for name, p in site.module.named_parameters(recurse=False) if tuple(p.shape) == (count,)]
    if len(sinks) > 1:
        return
    arguments["sinks"] = literal(bool(sinks), "a number a head is there or not")
    if sinks:
        parameters["sinks"] = Stored(sinks[0])
    bare = [p for p, call in site.inner.items() if _is_bare_norm(call, width) and not inside(p, compressors)]
    if bare:
        known = epsilons(Site(site.inner[bare[0]], {}, site.config))[0]
        arguments["head_norm_eps"] = Evidence(
            f"{bare[0]}: {known.label}", lambda m, c: known.resolve(m.get_submodule(bare[0]), c)
        )
    options = itertools.product(held_scales(site, width), _rotations(site, width))
    for scale, rotary in options:
        for parts in _compressions(site, compressors, rotary, names["down"], query_norm):
            yield Candidate("CompressedAttention", {**arguments, "scale": scale, **rotary, **parts}, parameters)


def _is_bare_norm(call: Call, width: int) -> bool:
    """A norm without weight, over heads: rsqrt of a mean in its trace."""
    if any(True for _ in call.module.parameters()) or not call.has_stream or call.hidden.ndim != 4:
        return False
    if call.hidden.shape != call.result.shape or call.hidden.shape[-1] != width:
        return False
    return {"rsqrt", "mean"} <= Site(call, {}, None).operations.steps


def _rotations(site: Site, width: int) -> Iterator[dict[str, Evidence]]:
    for number, (cos, _) in enumerate(site.context.tables):
        if 2 * cos.shape[-1] <= width:
            for style, at in itertools.product(("interleaved", "half"), ("last", "first")):
                yield {
                    "table": literal(number, "a table that the layer is handed"),
                    "rotary": literal(style, "enumerated"),
                    "rotary_at": literal(at, "enumerated"),
                }


def _compressions(
    site: Site, compressors: list[str], rotary: dict[str, Evidence], down: str, query_norm: SeenNorm
) -> Iterator[dict[str, Candidate]]:
    """Nothing, or a compressor that turns its entries as the layer turns its keys, perhaps with an indexer."""
    if not compressors:
        yield {}
        return
    path = compressors[0]
    chooses = [found for found in selectors(site) if found.startswith(path + ".")]
    for compressor in _compressor(site, path, chooses, rotary):
        if not chooses:
            yield {"compressor": compressor}
        for indexer in _indexers(site, chooses[0], rotary, query_norm) if chooses else ():
            yield {"compressor": compressor, "indexer": indexer}


def _compressor(site: Site, path: str, without: list[str], rotary: dict[str, Evidence]) -> Iterator[Candidate]:
    """The two projections of the input and the norm at `path`, each projection as the value and as the gate."""
    inner = {p: c for p, c in site.inner.items() if p.startswith(path + ".") and not inside(p, without)}
    norms = seen_norms(site, inner)
    own = [(n, p.shape) for n, p in site.module.get_submodule(path).named_parameters(recurse=False) if p.ndim == 2]
    if len(norms) != 1 or len(own) != 1:
        return
    place = f"{path}.{own[0][0]}"
    inputs = [p for p, c in inner.items() if _is_matrix(c) and same(c.hidden, site.call.hidden)]
    inputs = [p for p in inputs if inner[p].result.shape[-1] == own[0][1][1]]
    norm = f"{norms[0].path}.{norms[0].weight}"

    def overlap(module: nn.Module, config: Any) -> bool:
        return module.get_parameter(place).shape[1] == 2 * module.get_parameter(norm).shape[0]

    for value, gate in itertools.permutations(inputs, 2):
        yield Candidate(
            "Compressor",
            {
                "hidden": size(f"{value}.weight", 1),
                "head_dim": size(norm, 0),
                "rate": size(place, 0),
                "norm_eps": norms[0].eps,
                "overlap": Evidence(f"columns of {place} are twice those of {norm}", overlap),
                **rotary,
            },
            {
                "value.weight": Stored(f"{value}.weight"),
                "gate.weight": Stored(f"{gate}.weight"),
                "place": Stored(place),
                "norm.weight": Stored(norm),
            },
        )


def _indexers(site: Site, path: str, rotary: dict[str, Evidence], query_norm: SeenNorm) -> Iterator[Candidate]:
    inner = {p: c for p, c in site.inner.items() if p.startswith(path + ".") and _is_matrix(c)}
    latent = site.inner[query_norm.path].result
    queries = [p for p, c in inner.items() if same(c.hidden, latent)]
    count = tensors(site.inner[path].output)[0].shape[-1]
    for query in queries[:1]:
        for compressor in _compressor(site, path, [], rotary):
            spec = compressor.spec(site.module, site.config).arguments
            heads = inner[query].result.shape[-1] // spec["head_dim"]
            weights = [p for p, c in inner.items() if same(c.hidden, site.call.hidden) and c.result.shape[-1] == heads]
            entries = site.call.hidden.shape[1] // spec["rate"]
            counts = number_evidence(site, path, count, ("top",), entries)[:1]
            for weight, top_k in itertools.product(weights, counts):
                yield Candidate(
                    "CompressedIndexer",
                    {
                        "hidden": size(f"{weight}.weight", 1),
                        "source": size(f"{query}.weight", 1),
                        "heads": size(f"{weight}.weight", 0),
                        "top_k": top_k,
                        "compressor": compressor,
                    },
                    {"query.weight": Stored(f"{query}.weight"), "weight.weight": Stored(f"{weight}.weight")},
                )
