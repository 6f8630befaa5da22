"""Candidates for a state space of each channel: what convolved channels are projected to, and what is normed of it."""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from dayzero.onboard.candidates.causes import causes, named_choice
from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, below, literal, present, size
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.projections import (
    Share,
    depthwise,
    equal_values,
    input_projections,
    shares,
    split_convolutions,
)
from dayzero.onboard.oracle.calls import Call
from dayzero.runtime.weights import Flatten, Part, Source, Stored, Unsqueeze

_ORDERS = (("u", "gate"), ("gate", "u"))


def propose_mamba(site: Site) -> list[Candidate]:
    """Every assignment of the parameters behind the convolution that their shapes allow."""
    output = [path for path, call in linear_calls(site).items() if equal_values(call.result, site.call.result)]
    convolutions, inputs = depthwise(site), input_projections(site)
    if len(output) != 1 or len(convolutions) != 1 or not inputs:
        return []
    conv, width = convolutions[0]
    taken = {f"{output[0]}.weight", f"{output[0]}.bias", conv, conv.removesuffix("weight") + "bias"}
    taken |= {f"{path}.{kind}" for item in inputs for path in item.paths for kind in ("weight", "bias")}
    left = {name: tuple(p.shape) for name, p in site.module.named_parameters() if name not in taken}
    norms = list(_norm_calls(site))
    weights = [name for path, _ in norms for name in left if name.startswith(f"{path}.")]
    left = {name: shape for name, shape in left.items() if name not in weights}
    if len(norms) not in (0, 3) or len(left) != 5:
        return []
    acts = [named_choice(site, name) for name in ("silu", "gelu", "relu") if name in site.operations.steps]
    splits = list(shares(inputs, {"u": width, "gate": width}, _ORDERS, width))
    found: list[Candidate] = []
    for down, up, rate, bias, skip in itertools.permutations(left):
        fit = _fit(left, width, down, up, rate, bias, skip)
        if fit is None:
            continue
        for split, normed, act in itertools.product(splits, _normings(site, norms, *fit), acts):
            found.append(_candidate(site, output[0], conv, split, (down, up, rate, bias, skip), normed, act))
    return found


def _fit(
    left: Mapping[str, tuple[int, ...]], width: int, down: str, up: str, rate: str, bias: str, skip: str
) -> tuple[int, int] | None:
    """(rank, state), where the five shapes are those of a state space of `width` channels, with heads or without."""
    heads = left[down][0] if len(left[down]) == 3 else None
    if heads is not None and width % heads:
        return None
    lead = (width,) if heads is None else (heads, width // heads)
    if left[bias] != lead or left[skip] != lead or left[rate][:-1] != lead or left[up][:-1] != lead:
        return None
    rank, state = left[up][-1], left[rate][-1]
    wanted = (rank + 2 * state, width) if heads is None else (heads, rank + 2 * state, width // heads)
    return (rank, state) if left[down] == wanted else None


def _norm_calls(site: Site) -> Iterator[tuple[str, Call]]:
    """Calls of modules that divide by a root mean square, with one weight vector or none."""
    for path, call in site.inner.items():
        if len(list(call.module.parameters())) > 1 or not call.has_stream or call.hidden.shape != call.result.shape:
            continue
        weight = next(iter(call.module.parameters()), torch.ones(()))
        fits = weight.ndim == 0 or weight.shape == call.hidden.shape[-1:]
        if fits and _epsilon(site, call, weight) is not None:
            yield path, call


def _epsilon(site: Site, call: Call, weight: Tensor) -> Evidence | None:
    inner = Site(call, {}, site.config)
    for eps in sorted(inner.operations.constants):
        if 0 < eps < 0.1:
            made = call.hidden * torch.rsqrt(call.hidden.pow(2).mean(-1, keepdim=True) + eps) * weight
            if torch.allclose(made, call.result, rtol=1e-9, atol=1e-12):
                return causes(inner, eps)[0]
    return None


def _normings(site: Site, norms: list[tuple[str, Call]], rank: int, state: int) -> Iterator[dict[str, Any]]:
    """Which norm is which, by their sizes. Those of B and C are taken in the order in which they ran: a state's input
    and output are multiplied, so that one may hold the other's weight and nothing changes."""
    if not norms:
        yield {"norm": literal("none", "no norm"), "norm_eps": literal(0.0, "no norm"), "parameters": {}}
        return
    for three in itertools.permutations(norms):
        ordered = norms.index(three[1]) < norms.index(three[2])
        if not ordered or [call.hidden.shape[-1] for _, call in three] != [rank, state, state]:
            continue
        weighted = [dict(call.module.named_parameters()) for _, call in three]
        if len({len(own) for own in weighted}) != 1:
            continue
        parameters = {
            f"{ours}_norm.weight": Stored(f"{path}.{name}")
            for ours, (path, _), own in zip(("dt", "B", "C"), three, weighted, strict=True)
            for name in own
        }
        path, call = three[0]
        eps = _epsilon(site, call, next(iter(call.module.parameters()), torch.ones(())))
        if eps is not None:
            kind = "weighted" if parameters else "weightless"
            yield {
                "norm": literal(kind, "the norms' parameters"),
                "norm_eps": below(path, eps),
                "parameters": parameters,
            }


def _candidate(
    site: Site,
    output: str,
    conv: str,
    split: dict[str, Share],
    names: tuple[str, ...],
    normed: dict[str, Any],
    act: Evidence,
) -> Candidate:
    down, up, rate, bias, skip = names
    headed = site.module.get_parameter(down).ndim == 3
    rank, state = site.module.get_parameter(up).shape[-1], site.module.get_parameter(rate).shape[-1]
    conv_parameters, conv_bias = split_convolutions(site, [(conv, 0)], {"u": split["u"]}, {"u": 0})

    def rows(start: int, stop: int) -> Source:
        return Part(1, start, stop, Stored(down)) if headed else Unsqueeze((0,), Part(0, start, stop, Stored(down)))

    def flat(name: str) -> Source:
        return Flatten(0, Stored(name)) if headed else Stored(name)

    parameters: dict[str, Source] = {
        "dt_down": rows(0, rank),
        "B": rows(rank, rank + state),
        "C": rows(rank + state, rank + 2 * state),
        "dt_up": Stored(up) if headed else Unsqueeze((0,), Stored(up)),
        "dt_bias": flat(bias),
        "A_log": flat(rate),
        "D": flat(skip),
        "output.weight": Stored(f"{output}.weight"),
        **{name.replace("u_conv", "conv"): source for name, source in conv_parameters.items()},
        **normed["parameters"],
    }
    if site.inner[output].module.bias is not None:
        parameters["output.bias"] = Stored(f"{output}.bias")
    for role, share in split.items():
        parameters |= share.parameters(role)
    return Candidate(
        "Mamba",
        {
            "hidden": size(f"{output}.weight", 0),
            "width": size(conv, 0),
            "state": size(rate, site.module.get_parameter(rate).ndim - 1),
            "rank": size(up, site.module.get_parameter(up).ndim - 1),
            "conv_width": size(conv, 2),
            "heads": size(down, 0) if headed else literal(1, "matrices of all channels"),
            "norm": normed["norm"],
            "norm_eps": normed["norm_eps"],
            "bias": literal(split["u"].projection.bias, "the projection's parameters"),
            "output_bias": present(f"{output}.bias"),
            "conv_bias": conv_bias,
            "conv_act": act,
        },
        parameters,
    )
