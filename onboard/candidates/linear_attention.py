"""Candidates for linear attention with a fixed decay a head: a saved vector that is no parameter, and a norm under a
gate before the output."""

import itertools

import torch

from dayzero.onboard.candidates.causes import causes
from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, below, literal, size
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.projections import equal_values, input_projections, shares
from dayzero.onboard.oracle.reference import state_of
from dayzero.runtime.weights import Source, Squeeze, Stored

_SIDE_BY_SIDE = (("query", "key", "value"), ("query", "key", "value", "gate"))


def propose_lightning_attention(site: Site) -> list[Candidate]:
    """Heads from the vector, projections side by side or alone, and the activation of queries, keys and values."""
    output = [path for path, call in linear_calls(site).items() if equal_values(call.result, site.call.result)]
    inputs = input_projections(site)
    if len(output) != 1 or not inputs:
        return []
    width = site.module.get_parameter(f"{output[0]}.weight").shape[1]
    rows: dict[str, int] = dict.fromkeys(("query", "key", "value", "gate"), width)
    parameters = dict(site.module.named_parameters())
    vectors = {
        name: tensor.shape
        for name, tensor in state_of(site.module).items()
        if name not in parameters and tensor.is_floating_point() and 1 < tensor.numel() == max(tensor.shape)
    }
    found = []
    for name, shape in vectors.items():
        heads = max(shape)
        if width % heads:
            continue
        for split, (norm, eps, gate) in itertools.product(
            shares(inputs, rows, _SIDE_BY_SIDE, heads), list(_norms_under_a_gate(site, output[0], inputs))
        ):
            if not equal_values(split["gate"].values(), gate):
                continue
            ones = tuple(dim for dim, length in enumerate(shape) if length == 1)
            sources: dict[str, Source] = {
                "slope": Squeeze(ones, Stored(name)) if ones else Stored(name),
                "norm.weight": Stored(norm),
                "output.weight": Stored(f"{output[0]}.weight"),
            }
            for role, share in split.items():
                sources |= share.parameters(role)
            for act in ("silu", "relu", "gelu"):
                if act in site.operations.steps:
                    found.append(Candidate("LightningAttention", _arguments(output[0], name, eps, act), sources))
    return found


def _arguments(output: str, slope: str, eps: Evidence, act: str) -> dict[str, Evidence | Candidate]:
    def heads(module, config) -> int:
        return module.state_dict()[slope].numel()

    return {
        "hidden": size(f"{output}.weight", 0),
        "heads": Evidence(f"elements of {slope}", heads),
        "head_dim": Evidence(
            f"shape of {output}.weight[1] / heads",
            lambda module, config: module.get_parameter(f"{output}.weight").shape[1] // heads(module, config),
        ),
        "norm_eps": eps,
        "act": literal(act, "the trace's activation"),
    }


def _norms_under_a_gate(site: Site, output: str, inputs):
    """(weight, eps, gate) of norms whose result times a projection's sigmoid is what the output is fed."""
    before = site.inner[output].hidden
    for path, call in site.inner.items():
        own = list(call.module.named_parameters())
        if len(own) != 1 or own[0][1].ndim != 1 or not call.has_stream or call.result.numel() != before.numel():
            continue
        small = [value for value in sorted(Site(call, {}, site.config).operations.constants) if 0 < value < 0.1]
        for item in inputs:
            if item.rows != before.shape[-1] or len(small) != 1:
                continue
            gated = torch.sigmoid(item.result) * call.result.reshape(item.result.shape)
            if torch.allclose(gated.reshape(before.shape), before, rtol=1e-12, atol=1e-14):
                eps = causes(Site(call, {}, site.config), small[0])[0]
                yield f"{path}.{own[0][0]}", below(path, eps), item.result
