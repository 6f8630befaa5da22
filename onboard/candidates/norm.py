"""Candidates for a norm: over the whole stream or groups of it, centred or not, with a weight, 1 + it, or none."""

import itertools
from collections.abc import Iterator

import torch
from torch import nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, below, literal, size
from dayzero.onboard.candidates.gates import activations
from dayzero.onboard.candidates.nesting import Inner, site_below
from dayzero.onboard.oracle.narrow import replay_in_bfloat16
from dayzero.onboard.oracle.reference import state_of
from dayzero.onboard.prove.trace import trace
from dayzero.runtime.weights import Stored


def propose_norm(site: Site) -> list[Candidate]:
    """The epsilon is a constant that the module was seen to use; what becomes of the weight is enumerated."""
    parameters = {name: tensor for name, tensor in state_of(site.module).items() if tensor.is_floating_point()}
    width = site.call.hidden.shape[-1]
    steps = {step.name for step in site.operations.sequence}
    if all(tensor.ndim == 1 and tensor.shape[0] == width for tensor in parameters.values()):
        if _is_centred(steps):
            return list(_layer_norms(site, list(parameters)))
        return list(_rms_norms(site, list(parameters))) if len(parameters) < 2 else []
    return list(_self_gated(site))


def epsilons(site: Site) -> list[Evidence]:
    """Small constants that are added in the trace, and where each comes from."""
    inner = Inner(site, "")
    added = (step.numbers[-1] for step in site.operations.sequence if step.name == "add" and step.numbers)
    small = dict.fromkeys(value for value in added if 0 < value < 0.1)
    return [inner.cause(value) for value in small]


def _is_centred(steps: set[str]) -> bool:
    return "native_layer_norm" in steps or "sub" in steps


def _rms_norms(site: Site, names: list[str]) -> Iterator[Candidate]:
    arguments: dict[str, Evidence | Candidate] = {"width": _width(site, names)}
    weighed: dict[str, Evidence | Candidate] = {}
    if (groups := _groups(site)) is not None:
        arguments["groups"] = groups
    elif names and _weighs_in_float32(site):
        weighed["weight_after_cast"] = literal(False, "its casts in bfloat16")
    for eps in epsilons(site):
        if not names:
            yield Candidate("RMSNorm", {**arguments, "eps": eps, "scaled": literal(False, "no parameters")}, {})
            continue
        for offset in (0.0, 1.0):
            held = {**arguments, "eps": eps, "offset": literal(offset, "enumerated"), **weighed}
            yield Candidate("RMSNorm", held, {"weight": Stored(names[0])})
        for offset in (0.0, 1.0) if groups is None else ():
            held = {**arguments, "eps": eps, "offset": literal(offset, "enumerated")}
            yield Candidate("ScaledFirstRMSNorm", held, {"weight": Stored(names[0])})


def _weighs_in_float32(site: Site) -> bool:
    """Whether, of an input in bfloat16, nothing is rounded to it before the weight has multiplied: float64 cannot tell,
    and the reference's own casts do."""
    try:
        steps = trace(lambda: replay_in_bfloat16(site.call)).sequence
    except (RuntimeError, TypeError, ValueError):
        return False
    products = [place for place, step in enumerate(steps) if step.name == "mul"]
    means = [place for place, step in enumerate(steps) if step.name == "mean"]
    if not products or not means or products[-1] < means[-1]:
        return False
    last = steps[products[-1]]
    rounds = [step for step in steps[means[-1] : products[-1]] if step.makes == torch.bfloat16 != step.reads]
    return last.makes != torch.bfloat16 and not rounds


def _width(site: Site, names: list[str]) -> Evidence:
    return size(names[0], 0) if names else literal(site.call.hidden.shape[-1], "the stream")


def _groups(site: Site) -> Evidence | None:
    """More than one mean a vector: the number of elements of each comes from a setting."""
    width = site.call.hidden.shape[-1]
    means = [step.shape[-1] for step in site.operations.sequence if step.name == "mean" and step.shape]
    if not means or means[0] == width or width % means[0]:
        return None
    each = means[0]
    inner = Inner(site, "")
    other = next((n for n in range(1, width) if width % n == 0 and n != each), each)
    found = inner.driver(
        each, other, lambda seen: any(s.name == "mean" and s.shape[-1:] == (other,) for s in seen.sequence)
    )
    if found is None:
        return literal(width // each, "the trace's means")
    name = next(iter(state_of(site.module)), None)
    if name is None:
        return None
    return Evidence(
        f"shape of {name}[0] / {found.label}",
        lambda module, config: module.get_parameter(name).shape[0] // found.resolve(module, config),
    )


def _layer_norms(site: Site, names: list[str]) -> Iterator[Candidate]:
    eps = epsilons(site)
    for step in site.operations.sequence:
        if step.name == "native_layer_norm":
            eps = [Inner(site, "").cause(step.numbers[-1])]
    arguments: dict[str, Evidence | Candidate] = {
        "width": _width(site, names),
        "scaled": literal(bool(names), "the parameters"),
        "bias": literal(len(names) == 2, "the parameters"),
    }
    orders = itertools.permutations(names) if names else [()]
    for value, order in itertools.product(eps, orders):
        parameters = {role: Stored(name) for role, name in zip(("weight", "bias"), order, strict=False)}
        yield Candidate("LayerNorm", {**arguments, "eps": value}, parameters)


def _self_gated(site: Site) -> Iterator[Candidate]:
    """A norm inside, and two projections that read what it gives."""
    linears = [(path, call) for path, call in site.inner.items() if isinstance(call.module, nn.Linear)]
    norms = [path for path, call in site.inner.items() if call.has_stream and _is_vector(call.module)]
    if len(linears) != 2 or len(norms) != 1 or any(call.module.bias is not None for _, call in linears):
        return
    (down, _), (up, _) = linears
    rest: dict[str, Evidence | Candidate] = {"rank": size(f"{down}.weight", 0)}
    for norm, act in itertools.product(propose_norm(site_below(site, norms[0])), activations(site.operations)):
        if norm.block == "RMSNorm" and "weight" in norm.parameters:
            inner = below(norms[0], norm)
            held = {name: inner.arguments[name] for name in ("width", "eps", "offset")}
            parameters = {
                "norm.weight": inner.parameters["weight"],
                "down.weight": Stored(f"{down}.weight"),
                "up.weight": Stored(f"{up}.weight"),
            }
            act_here = literal(act, "the trace's activation")
            yield Candidate("SelfGatedRMSNorm", {**held, **rest, "act": act_here}, parameters)


def _is_vector(module: nn.Module) -> bool:
    shapes = [parameter.ndim for parameter in module.parameters()]
    return shapes == [1]
