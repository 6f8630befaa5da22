"""Candidates for hyper-connections: what reads several residual streams, and what merges them at the end."""

import itertools
from collections.abc import Iterator

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, attribute, literal, size
from dayzero.onboard.candidates.norm import epsilons
from dayzero.onboard.oracle.calls import floats
from dayzero.runtime.weights import Source, Stored


def propose_connection(site: Site) -> list[Candidate]:
    """A matrix over all streams, a bias for each of its rows, a scale for each of its groups of rows."""
    if site.call.hidden.ndim == 3:
        return list(_gated(site))
    weights = _parameters(site, site.call.hidden)
    if weights is None:
        return []
    streams = site.call.hidden.shape[-2]
    mixed = any(part.shape[-2:] == (streams, streams) for part in floats(site.call.output))
    iterations = _counts(site, streams) if mixed else [literal(None, "no mixing matrix among the outputs")]
    none = literal(0.0, "nothing is added")
    candidates = []
    for norm_eps, eps in itertools.product(epsilons(site), [*epsilons(site), none]):
        for post_scale, post_eps, count in itertools.product(_scales(site), dict.fromkeys((none, eps)), iterations):
            arguments = {
                **_sizes(site, weights["weight"]),
                "norm_eps": norm_eps,
                "eps": eps,
                "post_scale": post_scale,
                "post_eps": post_eps,
                "iterations": count,
            }
            candidates.append(Candidate("HyperConnection", arguments, dict(weights)))
    return candidates


def propose_merge(site: Site) -> list[Candidate]:
    """The weighted sum over streams, or their mean."""
    if not any(True for _ in site.module.parameters()):
        return [Candidate("StreamMean", {}, {})]
    if site.call.hidden.ndim == 3:
        return list(_gated(site))
    weights = _parameters(site, site.call.hidden)
    if weights is None:
        return []
    return [
        Candidate("StreamMerge", {**_sizes(site, weights["weight"]), "norm_eps": norm_eps, "eps": eps}, dict(weights))
        for norm_eps, eps in itertools.product(epsilons(site), epsilons(site))
    ]


def _gated(site: Site) -> Iterator[Candidate]:
    """Streams side by side: a norm of each, a gate of low rank over all channels, and a weight for each of them."""
    wide = site.call.hidden.shape[-1]
    streams = site.call.split(site.call.hidden)[0].shape[1]
    shapes = {name: tuple(parameter.shape) for name, parameter in site.module.named_parameters()}
    norms = [name for name, shape in shapes.items() if shape == (wide,)]
    ups = [name for name, shape in shapes.items() if len(shape) == 2 and shape[0] == wide]
    if len(norms) != 1 or len(ups) != 1 or len(shapes) not in {3, 4}:
        return
    rest = [name for name in shapes if name not in {*norms, *ups} and shapes[name][1:] == (wide,)]
    scales = [value for value in sorted(site.operations.constants) if value > 1]
    for down in rest:
        inject = next((name for name in rest if name != down), None)
        if shapes[down][0] != shapes[ups[0]][1] or (inject is not None and shapes[inject][0] != streams):
            continue
        count = next(iter(_counts(site, None, streams)), literal(streams, "seen at the input"))
        arguments: dict[str, Evidence | Candidate] = {
            "hidden": Evidence(
                f"shape of {norms[0]}[0] / streams",
                lambda module, config, count=count: (
                    module.get_parameter(norms[0]).shape[0] // count.resolve(module, config)
                ),
            ),
            "streams": count,
            "rank": size(down, 0),
            "injects": literal(inject is not None, "the parameters"),
        }
        parameters: dict[str, Source] = {
            "norm.weight": Stored(norms[0]),
            "down.weight": Stored(down),
            "up.weight": Stored(ups[0]),
        }
        if inject is not None:
            parameters["inject.weight"] = Stored(inject)
        for eps, offset, scale in itertools.product(epsilons(site), (0.0, 1.0), scales or [1.0]):
            held = {"eps": eps, "offset": literal(offset, "enumerated")}
            if inject is not None:
                held["post_scale"] = literal(scale, "constant in the trace")
            elif scale != (scales or [1.0])[0]:
                continue
            yield Candidate("GatedConnection", {**arguments, **held}, dict(parameters))


def _parameters(site: Site, streams: object) -> dict[str, Source] | None:
    """weight, bias and scale by their shapes: a matrix, a vector of as many entries as it has rows, a short vector."""
    named = list(site.module.named_parameters())
    matrices = [name for name, parameter in named if parameter.ndim == 2]
    if len(matrices) != 1 or len(named) != 3:
        return None
    rows = site.module.get_parameter(matrices[0]).shape[0]
    vectors = {parameter.numel(): name for name, parameter in named if parameter.ndim == 1}
    if rows not in vectors or len(vectors) != 2:
        return None
    scale = next(name for count, name in vectors.items() if count != rows)
    return {"weight": Stored(matrices[0]), "bias": Stored(vectors[rows]), "scale": Stored(scale)}


def _sizes(site: Site, weight: Source) -> dict[str, Evidence]:
    name = next(iter(weight.names({})))
    streams = site.call.hidden.shape[-2]
    hidden = site.call.hidden.shape[-1]
    count = next(iter(_counts(site, None, streams)), literal(streams, "seen at the input"))
    return {
        "hidden": Evidence(
            f"shape of {name}[1] / streams",
            lambda module, config: module.get_parameter(name).shape[1] // count.resolve(module, config),
        )
        if count.resolve(site.module, site.config) == streams
        else literal(hidden, "seen at the input"),
        "streams": count,
    }


def _counts(site: Site, beside: int | None, equal: int | None = None) -> list[Evidence]:
    """Integers of the module other than `beside`; or those that are `equal`, config fields among them."""
    held = [
        (value, attribute("", name))
        for name, value in sorted(vars(site.module).items())
        if isinstance(value, int) and not isinstance(value, bool) and not name.startswith("_")
    ]
    if equal is not None:
        return [evidence for value, evidence in held if value == equal] + site.explain(equal)
    return [evidence for value, evidence in held if 0 < value < 1000 and value != beside]


def _scales(site: Site) -> Iterator[Evidence] | list[Evidence]:
    """Factors of the trace that could be the size of the way back: what an attribute explains, then plain constants."""
    values = [value for value in sorted(site.operations.constants) if value > 0.1]
    found = [(site.explain(value) or [literal(value, "constant in the trace")])[0] for value in values]
    return [*found, literal(1.0, "no factor in the trace")]
