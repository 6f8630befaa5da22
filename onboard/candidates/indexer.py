"""Candidates for indexers: the part of a layer that chooses what it attends to."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, attribute, literal, size
from dayzero.onboard.candidates.norm import epsilons
from dayzero.onboard.oracle.calls import Call, same, tensors
from dayzero.onboard.structure.handed import handed_tables
from dayzero.runtime.weights import Part, Source, Stored


@dataclass(frozen=True)
class SeenNorm:
    """An RMS norm below the site: where, the name of its weight, its epsilon and offset."""

    path: str
    weight: str
    eps: Evidence
    offset: float


def seen_norms(site: Site, inner: dict[str, Call]) -> list[SeenNorm]:
    """The RMS norms with a weight that give exactly what these calls gave."""
    found = []
    for path, call in inner.items():
        parameters = list(call.module.named_parameters())
        if not call.has_stream or len(parameters) != 1 or call.hidden.shape != call.result.shape:
            continue
        name, weight = parameters[0]
        x, y = call.hidden, call.result
        if tuple(weight.shape) != x.shape[-1:]:
            continue
        for known in epsilons(Site(call, {}, site.config)):
            plain = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + known.resolve(call.module, site.config))
            for offset in (0.0, 1.0):
                if torch.allclose(plain * (offset + weight.detach()), y, rtol=1e-12, atol=1e-14):
                    eps = Evidence(
                        f"{path}: {known.label}",
                        lambda m, c, known=known, path=path: known.resolve(m.get_submodule(path), c),
                    )
                    found.append(SeenNorm(path, name, eps, offset))
    return found


def propose_indexers(site: Site, path: str, latent: Tensor | None) -> list[Candidate]:
    """Indexers that the module at `path` below the site could be. latent: the layer's query latent."""
    prefix = path + "."
    inner = {name: call for name, call in site.inner.items() if name.startswith(prefix)}
    return [
        *propose_lightning(site, path, inner, latent),
        *propose_blocks(site, path, inner),
        *propose_mean_pooled(site, path, inner),
    ]


def propose_lightning(site: Site, path: str, inner: dict[str, Call], latent: Tensor | None) -> list[Candidate]:
    """Three projections, of queries, of keys and of weights, and a LayerNorm of the keys; with two matrices beside
    them, an average over pools that is learned."""
    hidden = site.call.hidden
    linears = {name: call for name, call in inner.items() if isinstance(call.module, nn.Linear)}
    norms = {name: call for name, call in inner.items() if isinstance(call.module, nn.LayerNorm)}
    keys = [(k, n) for k, n in itertools.product(linears, norms) if same(norms[n].hidden, linears[k].result)]
    if len(linears) != 3 or len(keys) != 1:
        return []
    key, key_norm = keys[0]
    query_norms = [name for name, call in norms.items() if name != key_norm and same(call.hidden, hidden)]
    head_dim = linears[key].result.shape[-1]
    found = []
    for query, weight in itertools.permutations([name for name in linears if name != key]):
        heads = linears[weight].result.shape[-1]
        if linears[query].result.shape[-1] != heads * head_dim or not same(linears[weight].hidden, hidden):
            continue
        source = norms[query_norms[0]].result if query_norms else latent if latent is not None else hidden
        if not same(linears[query].hidden, source):
            continue
        parameters: dict[str, Source] = {
            "query.weight": Stored(f"{query}.weight"),
            "key.weight": Stored(f"{key}.weight"),
            "weight.weight": Stored(f"{weight}.weight"),
            "key_norm.weight": Stored(f"{key_norm}.weight"),
            "key_norm.bias": Stored(f"{key_norm}.bias"),
        }
        arguments = {
            "hidden": size(f"{key}.weight", 1),
            "source": size(f"{query}.weight", 1),
            "heads": size(f"{weight}.weight", 0),
            "head_dim": size(f"{key}.weight", 0),
            "key_norm_eps": attribute(key_norm, "eps"),
        }
        if query_norms:
            arguments["query_norm_eps"] = attribute(query_norms[0], "eps")
            parameters |= {
                "query_norm.weight": Stored(f"{query_norms[0]}.weight"),
                "query_norm.bias": Stored(f"{query_norms[0]}.bias"),
            }
        own = {name: tuple(p.shape) for name, p in site.module.get_submodule(path).named_parameters(recurse=False)}
        if own:
            found += _pooled(site, path, own, arguments, parameters)
            continue
        options = itertools.product(
            _counts(site, path), index_rotations(site, path), _position_scales(inner, heads, norms)
        )
        for top_k, rotary, (position, position_sources) in options:
            found.append(
                Candidate(
                    "LightningIndexer",
                    {**arguments, "top_k": top_k, **rotary, **position},
                    {**parameters, **position_sources},
                )
            )
    return found


def _pooled(
    site: Site,
    path: str,
    own: dict[str, tuple[int, ...]],
    arguments: dict[str, Evidence],
    parameters: dict[str, Source],
) -> Iterator[Candidate]:
    """place [pool, head_dim] and gate [head_dim, H] are matrices of the indexer itself."""
    hidden, width = site.call.hidden.shape[-1], _width(site, path)
    head_dim = arguments["head_dim"].resolve(site.module, site.config)
    if len(own) != 2 or "query_norm_eps" in arguments:
        return
    for place, gate in itertools.permutations(own):
        if own[gate] != (head_dim, hidden) or own[place][1] != head_dim:
            continue
        pool = own[place][0]
        for tail, count in ((True, width - pool + 1), (False, width)):
            switches = [e for e in number_evidence(site, path, tail, ("tail",)) if "training" not in e.label]
            for top_k in number_evidence(site, path, count, ("top",))[:1]:
                yield Candidate(
                    "PooledIndexer",
                    {
                        **arguments,
                        "top_k": top_k,
                        "pool": size(f"{path}.{place}", 0),
                        "tail": (switches or [literal(tail, "how many tokens are chosen")])[0],
                    },
                    {**parameters, "gate.weight": Stored(f"{path}.{gate}"), "place": Stored(f"{path}.{place}")},
                )


def propose_blocks(site: Site, path: str, inner: dict[str, Call]) -> list[Candidate]:
    """Queries and keys with an RMS norm each, and the numbers of blocks [B, heads, S, K] as a result."""
    index = tensors(site.inner[path].output)[0]
    linears = [name for name, call in inner.items() if isinstance(call.module, nn.Linear)]
    norms = seen_norms(site, inner)
    if len(linears) != 2 or len(norms) != 2 or index.dtype == torch.bool or index.ndim != 4:
        return []
    found = []
    for query, key in itertools.permutations(linears):
        rows, head_dim = (inner[name].result.shape[-1] for name in (query, key))
        if rows != index.shape[1] * head_dim:
            continue
        for query_norm, key_norm in itertools.permutations(norms):
            arguments = _of_projections(query, key, query_norm)
            parameters = _projections(query, key, query_norm, key_norm)
            numbers = [e for e in _numbers(site, path) if e.label.startswith(f"attribute {path}.")]
            units = [e for e in numbers if _value(site, e) > int(index.max()) and _value(site, e) > 1] and numbers
            units = sorted((e for e in units if _fits(site, e, index)), key=lambda e: "size" not in e.label)
            locals_ = sorted(numbers, key=lambda e: "local" not in e.label)
            counts = number_evidence(site, path, index.shape[-1], ("top",), int(index.max()) + 1)[:1]
            for top_k, unit, local, rotary in itertools.product(counts, units, locals_, _plain_rotations(site, path)):
                if len({top_k.label, unit.label, local.label}) == 3:
                    found.append(
                        Candidate(
                            "BlockIndexer",
                            {**arguments, "top_k": top_k, "unit": unit, "local": local, **rotary},
                            parameters,
                        )
                    )
    return found


def _fits(site: Site, unit: Evidence, index: Tensor) -> bool:
    """Whether blocks of this size have just the numbers that were chosen: the last one is always among them."""
    size_, length = _value(site, unit), site.call.hidden.shape[1]
    return size_ > 1 and int(index.max()) == (length - 1) // size_


def propose_mean_pooled(site: Site, path: str, inner: dict[str, Call]) -> list[Candidate]:
    """One projection of queries and keys together, a norm for each, and what is seen [B, 1, S, S] as a result."""
    seen = tensors(site.inner[path].output)[0]
    linears = [name for name, call in inner.items() if isinstance(call.module, nn.Linear)]
    norms = seen_norms(site, inner)
    if len(linears) != 1 or len(norms) != 2 or seen.dtype != torch.bool or seen.ndim != 4:
        return []
    width = next(inner[norm.path].hidden.shape[-1] for norm in norms)
    rows = inner[linears[0]].result.shape[-1]
    heads = rows // width - 1
    if rows % width or heads < 1:
        return []
    stored = Stored(f"{linears[0]}.weight")
    found = []
    for query_norm, key_norm in itertools.permutations(norms):
        if inner[query_norm.path].hidden.shape[-2] != heads:
            continue
        name = f"{linears[0]}.weight"
        norm_name = f"{query_norm.path}.{query_norm.weight}"
        parameters: dict[str, Source] = {
            "query.weight": Part(0, 0, heads * width, stored),
            "key.weight": Part(0, heads * width, rows, stored),
            "query_norm.weight": Stored(norm_name),
            "key_norm.weight": Stored(f"{key_norm.path}.{key_norm.weight}"),
        }
        arguments = {
            "hidden": size(name, 1),
            "head_dim": size(norm_name, 0),
            "heads": Evidence(
                f"shape of {name}[0] / head size, less one for the keys",
                lambda m, c, n=name, w=norm_name: m.get_parameter(n).shape[0] // m.get_parameter(w).shape[0] - 1,
            ),
            "norm_eps": query_norm.eps,
            "norm_offset": literal(query_norm.offset, "the norm's arithmetic"),
        }
        for (pool, budget), rotary in itertools.product(_budgets(site, path, seen), _plain_rotations(site, path)):
            found.append(
                Candidate("MeanPooledIndexer", {**arguments, "pool": pool, "budget": budget, **rotary}, parameters)
            )
    return found


def _budgets(site: Site, path: str, seen: Tensor) -> Iterator[tuple[Evidence, Evidence]]:
    """Pairs of numbers that explain how many tokens the last ones see: whole pools, and those after the last pool."""
    numbers = _numbers(site, path)
    counts, length = seen[0, 0].sum(-1), seen.shape[-1]
    for pool in sorted(numbers, key=lambda e: ("ratio" not in e.label, "pool" not in e.label)):
        width = _value(site, pool)
        if width < 2 or width > length:
            continue
        rests = torch.arange(1, length + 1) % width
        inside = (counts - rests)[-width:]
        if bool((inside == inside[0]).all()) and int(inside[0]) % width == 0:
            for budget in number_evidence(site, path, int(inside[0]), ("budget", "top"))[:1]:
                yield pool, budget


def _of_projections(query: str, key: str, norm: SeenNorm) -> dict[str, Evidence]:
    q, k = f"{query}.weight", f"{key}.weight"
    return {
        "hidden": size(k, 1),
        "head_dim": size(k, 0),
        "heads": Evidence(
            f"rows of {q} / rows of {k}",
            lambda m, c: m.get_parameter(q).shape[0] // m.get_parameter(k).shape[0],
        ),
        "norm_eps": norm.eps,
        "norm_offset": literal(norm.offset, "the norm's arithmetic"),
    }


def _projections(query: str, key: str, query_norm: SeenNorm, key_norm: SeenNorm) -> dict[str, Source]:
    return {
        "query.weight": Stored(f"{query}.weight"),
        "key.weight": Stored(f"{key}.weight"),
        "query_norm.weight": Stored(f"{query_norm.path}.{query_norm.weight}"),
        "key_norm.weight": Stored(f"{key_norm.path}.{key_norm.weight}"),
    }


def _plain_rotations(site: Site, path: str) -> list[dict[str, Evidence]]:
    """Rotations of a head's first channels."""
    found = []
    for options in index_rotations(site, path):
        at = options.pop("rotary_at", None)
        if at is None or at.resolve(site.module, site.config) == "first":
            found.append(options)
    return found


def _numbers(site: Site, path: str) -> list[Evidence]:
    """Integers that the indexer holds."""
    held = sorted(vars(site.module.get_submodule(path)).items())
    return [
        attribute(path, name) for name, value in held if type(value) is int and not name.startswith("_") and value >= 0
    ]


def _value(site: Site, evidence: Evidence) -> int:
    return evidence.resolve(site.module, site.config)


def number_evidence(
    site: Site, path: str, value: Any, words: tuple[str, ...], most: int | None = None
) -> list[Evidence]:
    """What holds this value: attributes of the indexer first, and those with one of the words.

    most: as many as there are to choose from. Where all are chosen, larger numbers with one of the words explain it.
    """
    held = [(n, v) for n, v in sorted(vars(site.module.get_submodule(path)).items()) if not n.startswith("_")]
    near = [attribute(path, n) for n, v in held if type(v) is type(value) and v == value]
    near.sort(key=lambda e: not any(word in e.label for word in words))
    if most is not None and value == most:
        large = [attribute(path, n) for n, v in held if type(v) is int and v >= most]
        near = [e for e in large if any(word in e.label for word in words)] or near
    far = site.explain(value) if type(value) is int else []
    return near or far or [literal(value, "seen")]


def _width(site: Site, path: str) -> int:
    return tensors(site.inner[path].output)[0].shape[-1]


def _counts(site: Site, path: str) -> list[Evidence]:
    """What explains the number of tokens chosen."""
    return number_evidence(site, path, _width(site, path), ("top",), site.call.hidden.shape[1])[:1]


def index_rotations(site: Site, path: str) -> list[dict[str, Evidence]]:
    """Both styles at both ends where the indexer is handed tables, and none."""
    tables = handed_tables(site.call, site.inner)
    of_indexer = handed_tables(site.inner[path])
    found: list[dict[str, Evidence]] = []
    for table in of_indexer:
        numbers = [number for number, other in enumerate(tables) if table.equals(other)]
        for number, style, at in itertools.product(numbers, ("half", "interleaved"), ("first", "last")):
            found.append(
                {
                    "rotary": literal(style, "enumerated"),
                    "rotary_at": literal(at, "enumerated"),
                    "table": literal(number, "the table that the indexer is handed"),
                }
            )
    return [*found, {"rotary": literal(None, "enumerated")}]


def _position_scales(
    inner: dict[str, Call], heads: int, norms: dict[str, Call]
) -> list[tuple[dict[str, Evidence], dict[str, Source]]]:
    learned = [
        name
        for name, call in inner.items()
        if name not in norms
        and call.has_stream
        and call.hidden.shape == call.result.shape
        and [tuple(p.shape) for p in call.module.parameters()] == [(heads,), (heads,)]
    ]
    if not learned:
        return [({}, {})]
    names = [f"{learned[0]}.{name}" for name, _ in inner[learned[0]].module.named_parameters()]
    argument = {"learned_position_scale": literal(True, f"{learned[0]} has two numbers a head")}
    return [
        (argument, {"query_position.scale": Stored(a), "query_position.bias": Stored(b)})
        for a, b in itertools.permutations(names)
    ]
