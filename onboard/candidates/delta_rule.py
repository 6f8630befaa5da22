"""Candidates for linear attention by the gated delta rule: projections alone or side by side, a short convolution, two
vectors that make the decay, and a gated norm before the output."""

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from dayzero.onboard.candidates.causes import Switch, causes, named_choice, switches
from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, below, literal, size
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.projections import (
    Share,
    count,
    depthwise,
    equal_values,
    input_projections,
    rows_per,
    shares,
    split_convolutions,
    vector,
)
from dayzero.onboard.oracle.calls import tensors
from dayzero.runtime.nn.activation import activation
from dayzero.runtime.weights import Source, Stored

# Orders in which projections stand side by side in one matrix.
_SIDE_BY_SIDE = (
    ("query", "key", "value"),
    ("query", "key", "value", "gate"),
    ("beta", "decay"),
    ("decay", "beta"),
    ("query", "key", "value", "gate", "beta", "decay"),
)
_MIXED = ("query", "key", "value")


def propose_delta_rule(site: Site) -> list[Candidate]:
    """Which projection is which, the two vectors, epsilons, the factor on beta, and the bound of the decay."""
    output = [path for path, call in linear_calls(site).items() if equal_values(call.result, site.call.result)]
    convolutions = depthwise(site)
    if len(output) != 1 or not convolutions:
        return []
    norm = _gated_norm(site, output[0])
    if norm is None:
        return []
    taken = {norm.weight, f"{output[0]}.weight", *(name for name, _ in convolutions)}
    inputs = input_projections(site)
    taken |= {f"{path}.weight" for item in inputs for path in item.paths}
    vectors = [name for name, _ in site.module.named_parameters() if name not in taken]
    if len(vectors) != 2 or not inputs:
        return []
    found: list[Candidate] = []
    flags = list(switches(site))
    details = list(
        itertools.product(_l2_epsilons(site, norm), _beta_scales(site, flags), _bounds(site, flags), _conv_acts(site))
    )
    for rate, bias in itertools.permutations(vectors):
        for sizes in _sizes(site, rate, bias, norm, convolutions):
            fitting = [detail for detail in details if sizes.channel_decay or detail[2].label.startswith("None")]
            for shared in shares(inputs, sizes.rows, _SIDE_BY_SIDE, sizes.key_heads):
                if norm.is_gate(shared["gate"]):
                    found += _with_details(site, output[0], norm, rate, bias, sizes, shared, convolutions, fitting)
    return found


@dataclass
class _Norm:
    """path, weight: of the norm. act, eps: how it gates and what it adds. gate: what it was gated with."""

    path: str
    weight: str
    act: str
    eps: Evidence
    gate: Tensor

    def is_gate(self, share: Share) -> bool:
        return equal_values(share.values(), self.gate)


def _gated_norm(site: Site, output: str) -> _Norm | None:
    """The call before the output projection that norms its first input and multiplies by its gated second one."""
    before = site.inner[output].hidden
    for path, call in site.inner.items():
        parameters = list(call.module.named_parameters())
        given = [t for t in tensors((call.args, call.kwargs)) if t.is_floating_point()]
        if len(parameters) != 1 or parameters[0][1].ndim != 1 or len(given) != 2:
            continue
        if not equal_values(call.result, before):
            continue
        inner = Site(call, {}, site.config)
        weight = parameters[0][1].detach()
        for act, eps in itertools.product(("silu", "sigmoid", "gelu", "relu"), sorted(inner.operations.constants)):
            if not 0 < eps < 0.1:
                continue
            gate = torch.sigmoid(given[1]) if act == "sigmoid" else activation(act)(given[1])  # type: ignore[arg-type]
            made = given[0] * torch.rsqrt(given[0].pow(2).mean(-1, keepdim=True) + eps) * weight * gate
            if torch.allclose(made, call.result, rtol=1e-9, atol=1e-12):
                return _Norm(path, f"{path}.{parameters[0][0]}", act, below(path, causes(inner, eps)[0]), given[1])
    return None


@dataclass
class _Sizes:
    heads: int
    key_heads: int
    channel_decay: bool
    key_dim: Evidence
    rows: dict[str, int] = field(default_factory=dict)


def _sizes(site: Site, rate: str, bias: str, norm: _Norm, convolutions: list[tuple[str, int]]) -> Iterator[_Sizes]:
    """Heads from the shape of `rate`, value size from the norm, key size from the scale in the trace."""
    module = site.module
    heads, decays = module.get_parameter(rate).numel(), module.get_parameter(bias).numel()
    values = heads * module.get_parameter(norm.weight).numel()
    keys, odd = divmod(sum(channels for _, channels in convolutions) - values, 2)
    if odd or keys <= 0 or decays % heads or values != norm.gate.numel() // site.call.hidden[..., 0].numel():
        return
    for key_dim in range(1, keys + 1):
        scale = key_dim**-0.5
        if keys % key_dim or not any(abs(scale - c) < 1e-12 for c in site.operations.constants | {1.0}):
            continue
        if heads % (keys // key_dim) or decays not in (heads, heads * key_dim):
            continue
        channel = decays != heads
        if channel:
            evidence = Evidence(
                f"shape of {bias} / heads",
                lambda module, config: module.get_parameter(bias).numel() // module.get_parameter(rate).numel(),
            )
        else:
            explained = [e for e in site.explain(key_dim) if isinstance(e.resolve(module, site.config), int)]
            evidence = sorted(explained, key=lambda e: "." in e.label)[0] if explained else literal(key_dim, "scale")
        rows = {"query": keys, "key": keys, "value": values, "gate": values, "beta": heads, "decay": decays}
        yield _Sizes(heads, keys // key_dim, channel, evidence, rows)


def _with_details(
    site: Site,
    output: str,
    norm: _Norm,
    rate: str,
    bias: str,
    sizes: _Sizes,
    shared: dict[str, Share],
    convolutions: list[tuple[str, int]],
    details: list[tuple[Evidence, ...]],
) -> Iterator[Candidate]:
    parameters: dict[str, Source] = {
        "A_log": vector(site, rate),
        "dt_bias": vector(site, bias),
        "norm.weight": Stored(norm.weight),
        "output.weight": Stored(f"{output}.weight"),
    }
    for role, share in shared.items():
        parameters |= share.parameters(role)
    conv_parameters, conv_bias = split_convolutions(
        site, convolutions, {role: shared[role] for role in _MIXED}, sizes.rows
    )
    if not conv_parameters:
        return
    heads = count(rate)
    arguments = {
        "hidden": size(f"{output}.weight", 0),
        "heads": heads,
        "key_heads": rows_per(site, shared["query"], sizes.key_dim, "key size"),
        "key_dim": sizes.key_dim,
        "value_dim": size(norm.weight, 0),
        "conv_width": size(convolutions[0][0], 2),
        "norm_eps": norm.eps,
        "channel_decay": literal(sizes.channel_decay, "the shape of the vectors"),
        "decay_rank": shared["decay"].rank(),
        "gate_rank": shared["gate"].rank(),
        "gate_act": named_choice(site, norm.act, norm.path),
        "conv_bias": conv_bias,
    }
    for l2_eps, beta_scale, bound, conv_act in details:
        varied = {"l2_eps": l2_eps, "beta_scale": beta_scale, "bound": bound, "conv_act": conv_act}
        yield Candidate("GatedDeltaNet", {**arguments, **varied}, {**parameters, **conv_parameters})


def _l2_epsilons(site: Site, norm: _Norm) -> list[Evidence]:
    """Small constants that are there for another reason than the norm's epsilon; those of the norm where none is."""
    small = [value for value in sorted(site.operations.constants) if 0 < value < 0.1]
    found = [evidence for value in small for evidence in causes(site, value)]
    others = [e for e in found if not e.label.startswith(f"attribute {norm.path}.")]
    return [e for e in others or found if 0 < e.resolve(site.module, site.config) < 0.1]


def _beta_scales(site: Site, flags: list[Switch]) -> list[Evidence]:
    """1, or 2 where a boolean that the module reads may say so: then a state's eigenvalues may be negative."""
    found = [literal(1.0, "no factor")]
    if 2.0 in site.operations.constants:
        for flag, _, operations in flags:
            if operations.steps != site.operations.steps or (operations.constants ^ site.operations.constants) - {2.0}:
                continue  # it does something else
            for on, off in ((2.0, 1.0), (1.0, 2.0)):
                found.append(
                    Evidence(
                        f"{on} where {flag.label}, else {off}",
                        lambda module, config, flag=flag, on=on, off=off: on if flag.resolve(module, config) else off,
                    )
                )
        found.append(literal(2.0, "constant in the trace"))
    return found


def _bounds(site: Site, flags: list[Switch]) -> list[Evidence]:
    """None, or a negative constant of the trace, together with the boolean that takes it away, if one does."""
    none = literal(None, "no bound")
    found: list[Evidence] = []
    for value in sorted(c for c in site.operations.constants if c < 0):
        takes_away = [flag for flag, _, operations in flags if value not in operations.constants]
        for bound in causes(site, value):
            found += [_where(flag, bound) for flag in takes_away] or [bound]
    return [*found, none]


def _where(flag: Evidence, value: Evidence) -> Evidence:
    def resolve(module: Any, config: Any) -> Any:
        return value.resolve(module, config) if flag.resolve(module, config) else None

    return Evidence(f"{value.label} where {flag.label}", resolve)


def _conv_acts(site: Site) -> list[Evidence]:
    names = [name for name in ("silu", "gelu", "relu") if name in site.operations.steps]
    return [named_choice(site, name) for name in names]
