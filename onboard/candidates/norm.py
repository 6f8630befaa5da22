"""Candidates for a norm: one weight vector of the stream's width, an epsilon, and whether 1 is added to the weight."""

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal, size
from dayzero.runtime.weights import Stored


def propose_norm(site: Site) -> list[Candidate]:
    """RMS norms. The epsilon is a constant that the module was seen to use; the offset is enumerated."""
    parameters = list(site.module.named_parameters())
    if len(parameters) != 1 or parameters[0][1].ndim != 1 or site.call.hidden.shape[-1] != parameters[0][1].shape[0]:
        return []
    name = parameters[0][0]
    return [
        Candidate(
            "RMSNorm",
            {"width": size(name, 0), "eps": eps, "offset": literal(offset, "enumerated")},
            {"weight": Stored(name)},
        )
        for eps in epsilons(site)
        for offset in (0.0, 1.0)
    ]


def epsilons(site: Site) -> list[Evidence]:
    """Small constants of the trace, each with its best explanation."""
    small = sorted(value for value in site.operations.constants if 0 < value < 0.1)
    return [(site.explain(value) or [literal(value, "constant in the trace")])[0] for value in small]
