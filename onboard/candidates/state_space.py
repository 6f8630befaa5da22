"""Candidates for state spaces: one wide projection, a short convolution, and vectors that make step and decay."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dayzero.onboard.candidates.causes import causes, causing, changed, named_choice
from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, attribute, below, literal, present, size
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.projections import (
    Projection,
    Share,
    count,
    depthwise,
    equal_values,
    input_projections,
    shares,
    split_convolutions,
    vector,
)
from dayzero.onboard.oracle.calls import tensors
from dayzero.onboard.prove.trace import trace
from dayzero.runtime.weights import Source, Stored

_ROLES = ("gate", "u", "B", "C", "dt")


def propose_mamba2(site: Site) -> list[Candidate]:
    """Three vectors of one value a head, groups, the norm and where it gates, factors and limits of the step."""
    output = [path for path, call in linear_calls(site).items() if equal_values(call.result, site.call.result)]
    convolutions = depthwise(site)
    inputs, ratio = _scaled_inputs(site)
    if len(output) != 1 or len(convolutions) not in (1, 3) or not inputs:
        return []
    norms = list(_norms(site, output[0]))
    taken = {f"{output[0]}.weight", f"{output[0]}.bias"}
    taken |= {name for weight, _ in convolutions for name in (weight, _bias_of(weight))}
    taken |= {f"{path}.{kind}" for item in inputs for path in item.paths for kind in ("weight", "bias")}
    taken |= {norm.weight for norm in norms if norm.weight}
    vectors = [name for name, _ in site.module.named_parameters() if name not in taken]
    if len(vectors) != 3 or len({site.module.get_parameter(name).numel() for name in vectors}) != 1:
        return []
    heads = site.module.get_parameter(vectors[0]).numel()
    width = site.module.get_parameter(f"{output[0]}.weight").shape[1]
    states, odd = divmod(sum(channels for _, channels in convolutions) - width, 2)
    if width % heads or states <= 0 or odd:
        return []
    rows = {"gate": width, "u": width, "B": states, "C": states, "dt": heads}
    splits = list(shares(inputs, rows, (_ROLES,)))
    if not splits:
        return []
    acts = [named_choice(site, name) for name in ("silu", "gelu", "relu") if name in site.operations.steps]
    details = list(
        itertools.product(_groups(site, heads, states), norms, _input_multipliers(site, ratio), _limits(site), acts)
    )
    return [
        candidate
        for split in splits
        for order in itertools.permutations(vectors)
        for candidate in _mamba2(site, output[0], split, order, details)
    ]


def _bias_of(weight: str) -> str:
    return weight.removesuffix("weight") + "bias"


def _scaled_inputs(site: Site) -> tuple[list[Projection], float]:
    """The projections of the module's input times one number, and the number."""
    if found := input_projections(site):
        return found, 1.0
    hidden = site.call.hidden
    for call in linear_calls(site).values():
        if call.hidden.shape == hidden.shape:
            ratio = (call.hidden / hidden).median()
            if torch.allclose(call.hidden, ratio * hidden, rtol=1e-12, atol=0.0):
                return input_projections(site, call.hidden), float(ratio)
    return [], 1.0


@dataclass
class _Norm:
    kind: str
    groups: Evidence
    eps: Evidence
    weight: str | None


def _norms(site: Site, output: str) -> Iterator[_Norm]:
    """How the last values are normed and gated: found by trying on the captured call before the output projection."""
    before = site.inner[output].hidden
    some = False
    for path, call in site.inner.items():
        parameters = list(call.module.named_parameters())
        given = [t for t in tensors((call.args, call.kwargs)) if t.is_floating_point()]
        if len(parameters) != 1 or parameters[0][1].shape != before.shape[-1:] or len(given) != 2:
            continue
        if not equal_values(call.result, before):
            continue
        some = True
        inner = Site(call, {}, site.config)
        weight, width = parameters[0][1].detach(), before.shape[-1]
        values, gate = (t.reshape(-1, width) for t in given)
        small = [value for value in sorted(inner.operations.constants) if 0 < value < 0.1]
        for kind, eps, groups in itertools.product(("gate_first", "norm_first"), small, _divisors(width)):
            normed = (values * F.silu(gate) if kind == "gate_first" else values).unflatten(-1, (groups, -1))
            normed = (normed * torch.rsqrt(normed.pow(2).mean(-1, keepdim=True) + eps)).flatten(-2) * weight
            normed = normed if kind == "gate_first" else normed * F.silu(gate)
            if torch.allclose(normed, call.result.reshape(-1, width), rtol=1e-9, atol=1e-12):
                name = f"{path}.{parameters[0][0]}"
                from_groups = _norm_groups(call.module, path, name, groups, width)
                yield _Norm(kind, from_groups, below(path, causes(inner, eps)[0]), name)
    if not some:
        yield _Norm("none", literal(1, "no norm"), literal(0.0, "no norm"), None)


def _norm_groups(module: nn.Module, path: str, weight: str, groups: int, width: int) -> Evidence:
    """From an attribute of the norm: their number, or the size of one."""
    for name, value in sorted(vars(module).items()):
        if isinstance(value, int) and not isinstance(value, bool) and not name.startswith("_"):
            if value == groups:
                return attribute(path, name)
            if value * groups == width:
                held = attribute(path, name)
                return Evidence(
                    f"shape of {weight}[0] / {held.label}",
                    lambda module, config, held=held: (
                        module.get_parameter(weight).shape[0] // held.resolve(module, config)
                    ),
                )
    return literal(groups, "the norm's values")


def _divisors(number: int) -> list[int]:
    return [n for n in range(1, number + 1) if number % n == 0]


def _groups(site: Site, heads: int, states: int) -> list[Evidence]:
    """How many groups of heads share B and C: what divides both, with the attribute that says so where one does."""
    found = []
    for groups in _divisors(math.gcd(heads, states)):
        own = [name for name, v in sorted(vars(site.module).items()) if type(v) is int and v == groups]
        own = sorted((name for name in own if not name.startswith("_")), key=lambda name: "group" not in name)
        found.append(attribute("", own[0]) if own else literal(groups, "enumerated"))
    return found


def _input_multipliers(site: Site, ratio: float) -> list[Evidence]:
    """The number that the projections' input was multiplied by; where it is 1, the attribute that it is read from."""
    found = []
    for evidence, holder, name in causing(site, ratio):
        with changed(holder, name, 2 * ratio), torch.no_grad():
            moved = site.call.replay(site.call.hidden)
        with torch.no_grad():
            wanted = site.call.replay(2 * site.call.hidden)
        if torch.allclose(moved, wanted, rtol=1e-9, atol=1e-12):
            found.append(evidence)
    return found[:1] or [literal(ratio, "the projections' input")]


def _multipliers(site: Site, split: dict[str, Share]) -> Evidence:
    """A vector beside the parameters that is as long as the projection, one value for all rows of each part."""
    shared = split[_ROLES[0]].projection
    if not all(split[role].projection is shared for role in _ROLES):
        return literal(None, "no factors")
    for name, buffer in site.module.named_buffers():
        if buffer.numel() != shared.rows or not buffer.is_floating_point():
            continue
        parts = [buffer.flatten()[split[role].start : split[role].stop] for role in _ROLES]
        if all(bool((part == part[0]).all()) for part in parts):
            values = [float(part[0]) for part in parts]
            for field, held in sorted(site.config.to_dict().items()):
                if isinstance(held, (list, tuple)) and list(held) == values:
                    return Evidence(f"config {field}", lambda module, config, field=field: list(getattr(config, field)))
            return literal(values, f"the values of {name}")
    return literal(None, "no factors")


def _limits(site: Site) -> list[tuple[Evidence, Evidence]]:
    """The pair of numbers that the step is clamped between; infinity is no limit."""
    if "clamp" in site.operations.steps:
        for name, held in sorted(vars(site.module).items()):
            if isinstance(held, (list, tuple)) and len(held) == 2 and all(isinstance(v, (int, float)) for v in held):
                with changed(site.module, name, (0.0123, 0.4321)):
                    constants = trace(lambda: site.call.replay(site.call.hidden)).constants
                if {0.0123, 0.4321} <= constants:
                    return [(_limit(name, 0), _limit(name, 1))]
    return [(literal(None, "no limit"), literal(None, "no limit"))]


def _limit(name: str, end: int) -> Evidence:
    def resolve(module: nn.Module, config: Any) -> float | None:
        value = float(getattr(module, name)[end])
        return None if math.isinf(value) else value

    return Evidence(f"attribute {name}[{end}]", resolve)


def _mamba2(
    site: Site, output: str, split: dict[str, Share], order: tuple[str, ...], details: list[tuple]
) -> Iterator[Candidate]:
    rate, bias, skip = order
    convolutions = depthwise(site)
    mixed = {role: split[role] for role in ("u", "B", "C")}
    rows = {role: share.groups * (share.stop - share.start) for role, share in mixed.items()}
    conv_parameters, conv_bias = split_convolutions(site, convolutions, mixed, rows)
    parameters: dict[str, Source] = {
        "A_log": vector(site, rate),
        "dt_bias": vector(site, bias),
        "D": vector(site, skip),
        "output.weight": Stored(f"{output}.weight"),
        **conv_parameters,
    }
    if site.inner[output].module.bias is not None:
        parameters["output.bias"] = Stored(f"{output}.bias")
    for role, share in split.items():
        parameters |= share.parameters(role)
    states = Evidence(
        f"(shape of {convolutions[0][0]}[0] - width) / 2",
        lambda module, config: (
            (module.get_parameter(convolutions[0][0]).shape[0] - module.get_parameter(f"{output}.weight").shape[1]) // 2
        ),
    )
    for groups, norm, multiplier, (low, high), conv_act in details:
        yield Candidate(
            "Mamba2",
            {
                "hidden": size(f"{output}.weight", 0),
                "heads": count(rate),
                "head_dim": Evidence(
                    f"shape of {output}.weight[1] / heads",
                    lambda module, config: (
                        module.get_parameter(f"{output}.weight").shape[1] // module.get_parameter(rate).numel()
                    ),
                ),
                "state": Evidence(
                    f"{states.label} / groups",
                    lambda module, config, groups=groups: (
                        states.resolve(module, config) // groups.resolve(module, config)
                    ),
                ),
                "conv_width": size(convolutions[0][0], 2),
                "groups": groups,
                "norm": literal(norm.kind, "the call before the output"),
                "norm_groups": norm.groups,
                "norm_eps": norm.eps,
                "time_step_min": low,
                "time_step_max": high,
                "bias": literal(split["gate"].projection.bias, "the projection's parameters"),
                "output_bias": present(f"{output}.bias"),
                "conv_bias": conv_bias,
                "conv_act": conv_act,
                "input_multiplier": multiplier,
                "multipliers": _multipliers(site, split),
            },
            parameters | ({"norm.weight": Stored(norm.weight)} if norm.weight else {}),
        )
