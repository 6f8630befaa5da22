"""Candidates for mixers around one short convolution: gated before and behind it, or followed by a gated recurrence."""

import itertools
from typing import Any

from dayzero.onboard.candidates.causes import causes
from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal, present, size
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.projections import (
    Share,
    depthwise,
    equal_values,
    input_projections,
    shares,
    split_convolutions,
)
from dayzero.runtime.weights import Source, Squeeze, Stored

_THREE = (("B", "C", "u"), ("B", "u", "C"), ("C", "B", "u"))
_ACTIVATIONS = (("silu", "silu"), ("gelu_tanh", "gelu"), ("gelu", "gelu"), ("relu", "relu"))


def propose_short_convolution(site: Site) -> list[Candidate]:
    """Three projections of one width. Which two are multiplied before the convolution is tried; their order is none."""
    parts = _around_a_convolution(site)
    if parts is None:
        return []
    output, conv, width, left = parts
    if left:
        return []
    found = []
    for split in shares(input_projections(site), {"B": width, "C": width, "u": width}, _THREE):
        if split["B"].place < split["u"].place:
            arguments, parameters = _common(site, output, conv, split)
            found.append(Candidate("GatedShortConvolution", arguments, parameters))
    return found


def propose_convolution_residual(site: Site) -> list[Candidate]:
    """One depthwise convolution over the stream itself, added to it; what the sum is divided by is a number of the
    code, often the root of how many terms it has."""
    parameters = dict(site.module.named_parameters())
    convolutions = depthwise(site)
    if len(convolutions) != 1 or convolutions[0][1] != site.call.hidden.shape[-1]:
        return []
    name, channels = convolutions[0]
    rest = [other for other in parameters if other != name]
    if len(rest) > 1 or any(parameters[other].shape != (channels,) for other in rest):
        return []
    sources: dict[str, Source] = {"weight": Squeeze((1,), Stored(name))}
    if rest:
        sources["bias"] = Stored(rest[0])
    divided = [step.numbers[-1] for step in site.operations.sequence if step.name == "div" and step.numbers]
    arguments = {"hidden": size(name, 0), "conv_width": size(name, 2), "bias": literal(bool(rest), "the parameters")}
    return [
        Candidate("ConvolutionResidual", {**arguments, "divisor": divisor}, dict(sources))
        for divisor in [*(_root_of_terms(name, site, value) for value in dict.fromkeys(divided)), _UNDIVIDED]
    ]


_UNDIVIDED = literal(1.0, "no division in the trace")


def _root_of_terms(name: str, site: Site, value: float) -> Evidence:
    width = site.module.get_parameter(name).shape[2]
    if abs(value - (width + 1) ** 0.5) <= 1e-12 * value:
        return Evidence(
            f"sqrt(shape of {name}[2] + 1)", lambda module, config: (module.get_parameter(name).shape[2] + 1) ** 0.5
        )
    return causes(site, value)[0]


def propose_recurrent_block(site: Site) -> list[Candidate]:
    """Two projections, two block-diagonal gates with biases, and a vector behind the convolution."""
    parts = _around_a_convolution(site)
    if parts is None:
        return []
    output, conv, width, left = parts
    by_dims: dict[int, list[str]] = {1: [], 2: [], 3: []}
    for name in left:
        by_dims.setdefault(site.module.get_parameter(name).ndim, []).append(name)
    if [len(by_dims[dims]) for dims in (1, 2, 3)] != [1, 2, 2] or len(left) != 5:
        return []
    rates = [rate for value in sorted(c for c in site.operations.constants if c < 0) for rate in causes(site, value)]
    acts = [literal(name, "the trace's activation") for name, step in _ACTIVATIONS if step in site.operations.steps]
    found = []
    for split, matrices, biases, rate, act in itertools.product(
        shares(input_projections(site), {"gate": width, "u": width}, (("gate", "u"), ("u", "gate"))),
        itertools.permutations(by_dims[3]),
        itertools.permutations(by_dims[2]),
        rates,
        acts,
    ):
        arguments, parameters = _common(site, output, conv, split)
        arguments |= {"heads": size(matrices[0], 0), "act": act, "rate": rate}
        parameters |= {
            "input_gate": Stored(matrices[0]),
            "recurrence_gate": Stored(matrices[1]),
            "input_bias": Stored(biases[0]),
            "recurrence_bias": Stored(biases[1]),
            "A": Stored(by_dims[1][0]),
        }
        found.append(Candidate("RecurrentBlock", arguments, parameters))
    return found


def _around_a_convolution(site: Site) -> tuple[str, str, int, list[str]] | None:
    """(output projection, convolution's weight, its channels, what other parameters there are)."""
    output = [path for path, call in linear_calls(site).items() if equal_values(call.result, site.call.result)]
    convolutions, inputs = depthwise(site), input_projections(site)
    if len(output) != 1 or len(convolutions) != 1 or not inputs:
        return None
    conv, width = convolutions[0]
    taken = {f"{output[0]}.weight", f"{output[0]}.bias", conv, conv.removesuffix("weight") + "bias"}
    taken |= {f"{path}.{kind}" for item in inputs for path in item.paths for kind in ("weight", "bias")}
    left = [name for name, _ in site.module.named_parameters() if name not in taken]
    return output[0], conv, width, left


def _common(site: Site, output: str, conv: str, split: dict[str, Share]) -> tuple[dict[str, Any], dict[str, Source]]:
    """The arguments and parameters that both blocks have."""
    conv_parameters, conv_bias = split_convolutions(site, [(conv, 0)], {"u": split["u"]}, {"u": 0})
    parameters: dict[str, Source] = {
        "output.weight": Stored(f"{output}.weight"),
        **{name.replace("u_conv", "conv"): source for name, source in conv_parameters.items()},
    }
    if site.inner[output].module.bias is not None:
        parameters["output.bias"] = Stored(f"{output}.bias")
    for role, share in split.items():
        parameters |= share.parameters(role)
    arguments: dict[str, Evidence] = {
        "hidden": size(f"{output}.weight", 0),
        "width": size(conv, 0),
        "conv_width": size(conv, 2),
        "bias": literal(split["u"].projection.bias, "the projection's parameters"),
        "output_bias": present(f"{output}.bias"),
        "conv_bias": conv_bias,
    }
    return arguments, parameters
