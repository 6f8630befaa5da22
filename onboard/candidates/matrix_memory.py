"""Candidates for a matrix memory with exponential gates: four wide projections, two of one value a head, and a
LayerNorm of each head before the output."""

import itertools

import torch

from dayzero.onboard.candidates.causes import causes, drivers
from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, below, literal, present, size
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.projections import Projection, Share, equal_values, input_projections, rows_per, shares
from dayzero.onboard.oracle.calls import Call
from dayzero.runtime.weights import Source, Stored

_SIDE_BY_SIDE = (
    ("query", "key", "value"),
    ("query", "key", "value", "gate"),
    ("input_gate", "forget_gate"),
    ("forget_gate", "input_gate"),
)


def propose_mlstm(site: Site) -> list[Candidate]:
    """Which projection is which, the cap of the two gates, and the two epsilons."""
    output = [path for path, call in linear_calls(site).items() if equal_values(call.result, site.call.result)]
    inputs = input_projections(site)
    if len(output) != 1 or not inputs:
        return []
    found: list[Candidate] = []
    for path, call, gate in _gated_norms(site, output[0], inputs):
        heads, width = call.hidden.shape[-2], call.result.shape[-1]
        wide = sum(item.rows for item in inputs) - 2 * heads - 2 * width
        if wide <= 0 or wide % (2 * heads) or width % heads:
            continue
        keys = wide // 2
        rows = {"query": keys, "key": keys, "value": width, "gate": width, "input_gate": heads, "forget_gate": heads}
        splits = [split for split in shares(inputs, rows, _SIDE_BY_SIDE) if equal_values(split["gate"].values(), gate)]
        norm_eps = _norm_eps(call)
        if norm_eps is None or not splits:
            continue
        details = itertools.product(_eps(site, path), _caps(site))
        for (eps, cap), split in itertools.product(details, splits):
            found += _candidate(site, output[0], path, call, split, {"eps": eps, "soft_cap": cap, "norm_eps": norm_eps})
    return found


def _gated_norms(site: Site, output: str, inputs: list[Projection]):
    """(path, call, gate) of calls on [..., heads, size] whose result times a projection's sigmoid feeds the output."""
    before = site.inner[output].hidden
    for path, call in site.inner.items():
        own = [tuple(parameter.shape) for parameter in call.module.parameters()]
        if not call.has_stream or set(own) != {(before.shape[-1],)} or call.hidden.ndim != before.ndim + 1:
            continue
        wide = [Share(item, start, start + before.shape[-1]) for item in inputs for start in _starts(item, before)]
        for share in wide:
            gated = torch.sigmoid(share.values()).reshape(before.shape) * call.result.reshape(before.shape)
            if torch.allclose(gated, before, rtol=1e-12, atol=1e-14):
                yield path, call, share.values()


def _starts(item: Projection, before: torch.Tensor) -> range:
    return range(item.rows - before.shape[-1] + 1)


def _norm_eps(call: Call) -> Evidence | None:
    inner = Site(call, {}, None)
    small = [value for value in inner.operations.constants if 0 < value < 0.1]
    return causes(inner, small[0])[0] if len(small) == 1 else None


def _eps(site: Site, norm: str) -> list[Evidence]:
    """What is added to the denominator: small constants that have another cause than the norm, or the same value."""
    small = [value for value in sorted(site.operations.constants) if 0 < value < 0.1]
    found = []
    for value in small:
        own = [evidence for evidence in causes(site, value) if not evidence.label.startswith(f"attribute {norm}.")]
        fields = [evidence for evidence in site.explain(value) if evidence.label.startswith("config ")]
        found += fields[:1] if own and own[0].label[:1].isdigit() and fields else own
    return found


def _caps(site: Site) -> list[Evidence]:
    if "tanh" not in site.operations.steps:
        return [literal(None, "no tanh in the trace")]
    found: list[Evidence] = []
    for value in sorted(c for c in site.operations.constants if c > 1):
        found += drivers(site, value, value + 0.37, lambda seen, other=value + 0.37: other in seen.constants)
    return [*found, literal(None, "the tanh in the trace is no cap")]


def _candidate(
    site: Site, output: str, path: str, call: Call, split: dict[str, Share], details: dict[str, Evidence]
) -> list[Candidate]:
    names = [name for name, _ in call.module.named_parameters()]
    if len(names) > 2 or split["query"].projection.bias != split["gate"].projection.bias:
        return []
    heads = split["input_gate"]
    parameters: dict[str, Source] = {
        "output.weight": Stored(f"{output}.weight"),
        "norm_weight": Stored(f"{path}.{names[0]}"),
    }
    if len(names) == 2:
        parameters["norm_bias"] = Stored(f"{path}.{names[1]}")
    if site.inner[output].module.bias is not None:
        parameters["output.bias"] = Stored(f"{output}.bias")
    for role, share in split.items():
        parameters |= share.parameters(role)

    def each(role: str) -> Evidence:
        count = Evidence("heads", lambda module, config: heads.count(module))
        return rows_per(site, split[role], count, "heads")

    return [
        Candidate(
            "MLSTM",
            {
                "hidden": size(f"{output}.weight", 0),
                "heads": Evidence(f"rows of {heads.label}", lambda module, config: heads.count(module)),
                "key_dim": each("key"),
                "value_dim": each("value"),
                "eps": details["eps"],
                "norm_eps": below(path, details["norm_eps"]),
                "soft_cap": details["soft_cap"],
                "bias": literal(split["query"].projection.bias, "the projections' parameters"),
                "gate_bias": literal(heads.projection.bias, "the gates' parameters"),
                "output_bias": present(f"{output}.bias"),
                "norm_bias": literal(len(names) == 2, "the norm's parameters"),
            },
            parameters,
        )
    ]
