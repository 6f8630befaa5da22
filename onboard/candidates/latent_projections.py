"""Which projection of a latent attention is which: found by what flows, and by sizes that fit together."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from dayzero.onboard.candidates.evidence import Evidence, Site, attribute
from dayzero.onboard.oracle.calls import Call, same, tensors
from dayzero.onboard.structure.left import handed_latents


@dataclass
class Chain:
    """A latent: down(x), of which the first columns are normed, perhaps scaled, and projected up again.

    scale: what the normed latent is multiplied with before `up`. both: up reads [normed | raw].
    """

    down: str
    norm: str
    up: str
    scale: float
    both: bool


@dataclass
class Sizes:
    """Sizes that fit together, for one number of heads."""

    heads: Evidence
    nope: int
    rope: int
    value: int


@dataclass
class Parts:
    """Which projection is which. query: a chain, or the projection that reads the input itself; kv: None where the
    latents are handed to the layer. rope_key: a projection of its own for the turned part of the keys."""

    query: Chain | str
    kv: Chain | None
    kv_up: str
    rope_key: str | None
    gate: str | None
    output: str


def selectors(site: Site) -> list[str]:
    """Modules inside that give a selection: no stream, but integers or booleans with a place for every token."""
    batch, length = site.call.hidden.shape[:2]
    found = []
    for path, call in site.inner.items():
        outputs = tensors(call.output)
        if len(outputs) == 1 and not outputs[0].is_floating_point() and {batch, length} <= set(outputs[0].shape):
            found.append(path)
    return [path for path in found if not inside(path, [other for other in found if other != path])]


def inside(path: str, parents: list[str]) -> bool:
    return any(path == parent or path.startswith(parent + ".") for parent in parents)


def is_norm(call: Call) -> bool:
    parameters = list(call.module.parameters())
    if not call.has_stream or len(parameters) != 1 or parameters[0].ndim != 1:
        return False
    return call.hidden.shape == call.result.shape and call.hidden.shape[-1] == parameters[0].shape[0]


def chains_of(linears: dict[str, Call], norms: dict[str, Call], inputs: list[str], output: str) -> Iterator[Chain]:
    ups = [path for path in linears if path not in inputs and path != output]
    for down, norm in itertools.product(inputs, norms):
        width = norms[norm].hidden.shape[-1]
        if not same(norms[norm].hidden, linears[down].result[..., :width].contiguous()):
            continue
        normed, raw = norms[norm].result, linears[down].result
        for up in ups:
            fed = linears[up].hidden
            if fed.shape[-1] == width and (scale := _ratio(fed, normed)) is not None:
                yield Chain(down, norm, up, scale, both=False)
            elif fed.shape[-1] == 2 * raw.shape[-1] and same(fed[..., width:].contiguous(), raw):
                scale = _ratio(fed[..., :width], normed)
                yield from [] if scale is None else [Chain(down, norm, up, scale, both=True)]


def _ratio(a: Tensor, b: Tensor) -> float | None:
    """The positive factor between two tensors, None where there is none."""
    if a.numel() != b.numel():
        return None
    a, b = a.flatten(), b.flatten()
    scale = float((a @ b) / (b @ b))
    close = bool((a - scale * b).abs().max() <= 1e-12 * a.abs().max())
    return scale if close and scale > 0 else None


def assignments_of(
    site: Site, linears: dict[str, Call], chains: list[Chain], inputs: list[str], output: str
) -> Iterator[Parts]:
    """Every input projection and every chain has exactly one role."""
    ups = [path for path in linears if path not in inputs and path != output]
    handed = {} if chains else dict.fromkeys(ups)
    for kv in [*chains, None]:
        free = [chain for chain in chains if kv is not None and chain.down != kv.down and chain.up != kv.up]
        used = {kv.down} if kv is not None else set()
        if kv is None and not handed and not handed_latents(site.call):
            continue
        for query in [*free, *(path for path in inputs if path not in used)]:
            taken = used | {query.down if isinstance(query, Chain) else query}
            roles_up = {query.up} if isinstance(query, Chain) else set()
            rest_up = [up for up in ups if up not in roles_up and not (kv is not None and up == kv.up)]
            if kv is None:
                if len(rest_up) != 1:
                    continue
                kv_up = rest_up[0]
            elif rest_up:
                continue
            else:
                kv_up = kv.up
            rest = [path for path in inputs if path not in taken]
            if len(rest) > 2:
                continue
            for gate in [None, *rest]:
                others = [path for path in rest if path != gate]
                if len(others) > (1 if kv is not None else 0):
                    continue
                yield Parts(query, kv, kv_up, others[0] if others else None, gate, output)


def rows(site: Site, path: str) -> int:
    return site.module.get_parameter(f"{path}.weight").shape[0]


def columns(site: Site, path: str) -> int:
    return site.module.get_parameter(f"{path}.weight").shape[1]


def sizes_of(site: Site, parts: Parts) -> Iterator[Sizes]:
    """Numbers of heads, held by the module, for which all projections have the shapes they must."""
    wide, rank = columns(site, parts.output), columns(site, parts.kv_up)
    query_path = parts.query.up if isinstance(parts.query, Chain) else parts.query
    tried = set()
    for name, heads in sorted(vars(site.module).items()):
        if not isinstance(heads, int) or isinstance(heads, bool) or heads < 1 or name.startswith("_"):
            continue
        if heads in tried or wide % heads or rows(site, parts.kv_up) % heads or rows(site, query_path) % heads:
            continue
        tried.add(heads)
        value = wide // heads
        nope = rows(site, parts.kv_up) // heads - value
        gated = value if isinstance(parts.query, Chain) and parts.query.both and parts.gate is None else 0
        for query_width in {rows(site, query_path) // heads, rows(site, query_path) // heads - gated}:
            rope = query_width - nope
            if nope < 0 or rope < 0 or not query_width:
                continue
            if parts.kv is not None:
                narrow = rows(site, parts.kv.down) + (rows(site, parts.rope_key) if parts.rope_key else 0)
                if narrow != rank + rope or (parts.rope_key and rows(site, parts.kv.down) != rank):
                    continue
            if parts.gate is not None and rows(site, parts.gate) not in (heads, wide):
                continue
            yield Sizes(attribute("", name), nope, rope, value)
