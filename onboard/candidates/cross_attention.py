"""Candidates for a decoder's attention to what its encoder gives."""

from dayzero.onboard.candidates.equality import close, multiple
from dayzero.onboard.candidates.evidence import Candidate, Site, literal, present, size
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.softmax import watch
from dayzero.onboard.candidates.where_held import any_number, as_float, divided, named
from dayzero.onboard.oracle.calls import same
from dayzero.runtime.weights import Stored


def propose_cross_attention(site: Site) -> list[Candidate]:
    """Every way in which projections of the input and of the source make what the softmax was given."""
    if site.call.source is None or site.call.hidden.ndim != 3:
        return []
    linears = {path: call for path, call in linear_calls(site).items() if call.hidden.ndim == 3}
    ends = [path for path, call in linears.items() if same(call.result, site.call.result)]
    queries = [path for path, call in linears.items() if same(call.hidden, site.call.hidden)]
    sources = [path for path, call in linears.items() if same(call.hidden, site.call.source)]
    found: list[Candidate] = []
    for seen in watch(site.call) if ends else ():
        heads, _, head_dim = seen.query.shape[1:]
        made = {path: linears[path].result.unflatten(-1, (heads, -1)).transpose(1, 2) for path in (*queries, *sources)
                if linears[path].result.shape[-1] == heads * head_dim}  # fmt: skip
        scale = multiple(seen.products, seen.scores, by_position=False)
        if scale is None or seen.value.shape[-1] != head_dim:
            continue
        # A query may be scaled before its products; the factor then is the query's, and of the scores none is left.
        for query in (path for path in queries if path in made):
            grown = multiple(made[query], seen.query, by_position=False)
            keys = [path for path in sources if path in made and close(made[path], seen.key)]
            values = [path for path in sources if path in made and close(made[path], seen.value)]
            if grown is not None:
                found += [
                    _candidate(site, query, key, value, ends[-1], heads, head_dim, float(scale * grown))
                    for key in keys
                    for value in values
                ]
    return found


def _candidate(
    site: Site, query: str, key: str, value: str, end: str, heads: int, head_dim: int, scale: float
) -> Candidate:
    dim = named(site, head_dim, ("head_dim", "kv", "dim"))
    count = named(site, heads, ("heads",)) or literal(heads, "the softmax")
    constants = [1.0, *site.operations.constants]
    exact = min(constants, key=lambda constant: abs(constant - scale))
    biased = bool(getattr(site.module.get_submodule(query), "bias", None) is not None)
    names = {"query": query, "key": key, "value": value, "output": end}
    parameters = {f"{ours}.weight": Stored(f"{theirs}.weight") for ours, theirs in names.items()}
    for ours, theirs in names.items():
        if getattr(site.module.get_submodule(theirs), "bias", None) is not None:
            parameters[f"{ours}.bias"] = Stored(f"{theirs}.bias")
    arguments = {
        "hidden": size(f"{query}.weight", 1),
        "source": size(f"{key}.weight", 1),
        "heads": divided(size(f"{query}.weight", 0), dim) if dim is not None else count,
        "head_dim": dim if dim is not None else divided(size(f"{query}.weight", 0), count),
        "scale": as_float(any_number(site, exact, ("scal",))),
        "bias": present(f"{query}.bias") if biased else literal(False, "no projection has one"),
        "output_bias": present(f"{end}.bias"),
    }
    return Candidate("CrossAttention", arguments, parameters)
