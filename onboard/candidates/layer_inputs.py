"""Candidates for what a layer does with an input of its own that the model hands to it."""

from torch import nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, present, size
from dayzero.onboard.candidates.gates import activation_arguments
from dayzero.onboard.candidates.nesting import Inner
from dayzero.onboard.structure.chains import ChainCall
from dayzero.runtime.nn.layer_inputs import LAYER_INPUT
from dayzero.runtime.weights import Stored


def propose_gated_layer_input(site: Site) -> list[Candidate]:
    """The two projections at the ends of a chain, and the activation between them. site: of a `ChainCall`."""
    call = site.call
    if not isinstance(call, ChainCall) or LAYER_INPUT not in site.context.shared:
        return []
    ends = {"gate": call.first, "down": call.last}
    if any(type(site.module.get_submodule(path)) is not nn.Linear for path in ends.values()):
        return []
    biased = site.module.get_submodule(call.first).bias is not None
    arguments: dict[str, Evidence | Candidate] = {
        "hidden": size(f"{call.first}.weight", 1),
        "width": size(f"{call.first}.weight", 0),
        "bias": present(f"{call.first}.bias"),
    }
    kinds = ("weight", "bias") if biased else ("weight",)
    parameters = {f"{ours}.{kind}": Stored(f"{path}.{kind}") for ours, path in ends.items() for kind in kinds}
    acts = activation_arguments(Inner(site, ""))
    return [Candidate("GatedLayerInput", {**arguments, "act": act}, parameters) for act in acts]
