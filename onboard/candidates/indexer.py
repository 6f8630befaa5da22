"""Candidates for indexers: the part of a layer that chooses what it attends to."""

import itertools
from dataclasses import dataclass

from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Evidence, Site, attribute, literal, size
from dayzero.onboard.discover import Call, same, tensors
from dayzero.onboard.handed import handed_tables
from dayzero.runtime.block_spec import BlockSpec
from dayzero.runtime.weights import Source, Stored


@dataclass
class Nested:
    """A block inside another one: evidence that resolves to its BlockSpec, and where its parameters come from."""

    evidence: Evidence
    parameters: dict[str, Source]


def nested(block: str, arguments: dict[str, Evidence], parameters: dict[str, Source]) -> Nested:
    label = ", ".join(f"{name} from {evidence.label}" for name, evidence in arguments.items())

    def resolve(module, config):
        return BlockSpec(block=block, arguments={name: e.resolve(module, config) for name, e in arguments.items()})

    return Nested(Evidence(f"{block}({label})", resolve), parameters)


def propose_indexers(site: Site, path: str, latent: Tensor | None) -> list[Nested]:
    """Indexers that the module at `path` below the site could be. latent: the layer's query latent."""
    prefix = path + "."
    inner = {name: call for name, call in site.inner.items() if name.startswith(prefix)}
    return propose_lightning(site, path, inner, latent)


def propose_lightning(site: Site, path: str, inner: dict[str, Call], latent: Tensor | None) -> list[Nested]:
    """Three projections, of queries, of keys and of weights, and a LayerNorm of the keys."""
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
        options = itertools.product(
            _counts(site, path), index_rotations(site, path), _position_scales(inner, heads, norms)
        )
        for top_k, rotary, (position, position_sources) in options:
            found.append(
                nested(
                    "LightningIndexer",
                    {**arguments, "top_k": top_k, **rotary, **position},
                    {**parameters, **position_sources},
                )
            )
    return found


def _counts(site: Site, path: str) -> list[Evidence]:
    """What explains the number of tokens chosen: attributes of the indexer first."""
    width = tensors(site.inner[path].output)[0].shape[-1]
    explained = site.explain(width)
    near = [e for e in explained if e.label.startswith(f"attribute {path}.")]
    near.sort(key=lambda e: "top" not in e.label)
    return [(near or explained or [literal(width, "seen")])[0]]


def index_rotations(site: Site, path: str) -> list[dict[str, Evidence]]:
    """Both styles at both ends where the indexer is handed tables, and none."""
    tables = handed_tables(site.call, site.inner)
    of_indexer = handed_tables(_with_stream(site, path))
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


def _with_stream(site: Site, path: str) -> Call:
    return site.inner[path]


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
