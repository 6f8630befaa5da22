"""Candidates for a dense feed-forward layer: with a gate, its projections apart or in one matrix, or without."""

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal, present, size
from dayzero.onboard.candidates.gates import activation_arguments, activations, factors_before, gate_arguments
from dayzero.onboard.candidates.nesting import Inner
from dayzero.onboard.oracle.calls import Call, same
from dayzero.runtime.weights import Deinterleave, Part, Source, Stored

__all__ = ["activations", "linear_calls", "propose_feed_forward"]


def propose_feed_forward(site: Site) -> list[Candidate]:
    """Projections that read the module's input, and one that reads what becomes of them. Which is the gate, and how the
    rows of a joint matrix are ordered, is enumerated."""
    linears = linear_calls(site)
    inputs = [path for path, call in linears.items() if same(call.hidden, site.call.hidden)]
    down = [path for path in linears if path not in inputs]
    if len(down) != 1 or len(inputs) not in {1, 2}:
        return []
    outputs = _outputs(site, linears[down[0]].result)
    if not outputs:
        return []
    biased = linears[down[0]].module.bias is not None
    arguments, parameters = outputs
    base: dict[str, Evidence | Candidate] = {
        "hidden": size(f"{inputs[0]}.weight", 1),
        "width": size(f"{down[0]}.weight", 1),
        "bias": present(f"{down[0]}.bias"),
        **arguments,
    }
    kinds = ("weight", "bias") if biased else ("weight",)
    last = {f"down.{kind}": Stored(f"{down[0]}.{kind}") for kind in kinds}
    width = linears[down[0]].module.get_parameter("weight").shape[1]
    if len(inputs) == 1 and linears[inputs[0]].module.get_parameter("weight").shape[0] == width and not arguments:
        plain = {f"up.{kind}": Stored(f"{inputs[0]}.{kind}") for kind in kinds} | last
        return [Candidate("FeedForward", {**base, "act": act}, plain) for act in activation_arguments(Inner(site, ""))]
    found = []
    for rows, act, scale in itertools.product(
        _gates_and_ups(inputs, width, kinds), gate_arguments(Inner(site, "")), _gate_scales(site)
    ):
        found.append(Candidate("GatedFeedForward", {**base, "act": act, **scale}, {**rows, **last, **parameters}))
    return found


def linear_calls(site: Site) -> dict[str, Call]:
    """The plain projections below the module, in the order in which they ran."""
    return {path: call for path, call in site.inner.items() if isinstance(call.module, nn.Linear)}


def _gates_and_ups(inputs: list[str], width: int, kinds: tuple[str, ...]) -> Iterator[dict[str, Source]]:
    """Sources of gate and up: two matrices in either order, or halves of one, side by side or alternating."""
    if len(inputs) == 2:
        for gate, up in itertools.permutations(inputs):
            names = {"gate": gate, "up": up}
            yield {f"{ours}.{kind}": Stored(f"{theirs}.{kind}") for ours, theirs in names.items() for kind in kinds}
        return
    for alternate, names in itertools.product((False, True), (("gate", "up"), ("up", "gate"))):
        parameters: dict[str, Source] = {}
        for kind in kinds:
            joint: Source = Stored(f"{inputs[0]}.{kind}")
            joint = Deinterleave(0, 2, joint) if alternate else joint
            for half, name in enumerate(names):
                parameters[f"{name}.{kind}"] = Part(0, half * width, (half + 1) * width, joint)
        yield parameters


def _gate_scales(site: Site) -> list[dict[str, Evidence | Candidate]]:
    """Factors on the gate right before its activation, and none."""
    inner = Inner(site, "")
    found = [inner.cause(value) for value in factors_before(inner, activations(site.operations)) if value != 1.0]
    return [*({"gate_scale": evidence} for evidence in found), {}]


def _outputs(site: Site, last: Tensor) -> tuple[dict[str, Evidence | Candidate], dict[str, Source]] | None:
    """What the module does to its last projection: nothing, a factor, or a parameter of one element; None for more."""
    given = site.call.result.reshape(last.shape) if site.call.result.numel() == last.numel() else None
    if given is None:
        return None
    if same(last, given):
        return {}, {}
    ratio = float((given * last).sum() / last.square().sum())
    if not torch.allclose(last * ratio, given, rtol=1e-10, atol=0.0):
        return None
    for name, parameter in site.module.named_parameters():
        if parameter.numel() == 1 and abs(float(parameter.detach()) - ratio) <= 1e-10 * abs(ratio):
            return {"learned_scale": literal(True, "a parameter of one element")}, {"scale": Stored(name)}
    for value in sorted(site.operations.constants):
        if abs(value - ratio) <= 1e-10 * abs(ratio):
            return {"output_scale": Inner(site, "").cause(value)}, {}
    return None
