"""Where no block is proven, the reference's own code: copied with proven blocks inside, or whole, and proven too."""

from collections.abc import Mapping

import torch

from dayzero.onboard.candidates.evidence import Candidate, Site
from dayzero.onboard.candidates.lifted import lifted_candidates
from dayzero.onboard.candidates.lifted_router import propose_moe_with_lifted_router
from dayzero.onboard.lift.closure import LiftError
from dayzero.onboard.oracle.calls import Call
from dayzero.onboard.prove.block import Attempt, attempt
from dayzero.onboard.structure.token_mixing import mixes_tokens


def prove_lifted(
    site: Site, replace: Mapping[str, Candidate], generator: torch.Generator
) -> tuple[Attempt | None, list[Attempt], str]:
    """The first form of the module's own code that is proven, all that were tried, and why none is if none is. Of a
    mixture of experts only the router is copied, where that is enough.

    replace: path of a module inside -> the proven candidate for it; without them if it does not hold with them.
    """
    attempts: list[Attempt] = []
    why = ""
    for path, module in site.module.named_modules():
        # The source of its class is not what runs; proofs by sets of operations may not tell the two apart.
        if "forward" in vars(module) and not any(path == held or path.startswith(f"{held}.") for held in replace):
            return None, attempts, f"forward of {path or 'the module'} was replaced: its class is not what runs"
    for candidate in propose_moe_with_lifted_router(site):
        attempts.append(_tried(candidate, site, generator))
        if attempts[-1].proven:
            return attempts[-1], attempts, ""
    for inside in [dict(replace), {}] if replace else [{}]:
        try:
            candidates = lifted_candidates(site, inside)
        except LiftError as error:
            why = why or str(error)
            continue
        for candidate in candidates:
            tried = _tried(candidate, site, generator)
            attempts.append(tried)
            if tried.proven:
                return tried, attempts, ""
            why = why or f"its copy {tried.objection}"
    return None, attempts, why


def _tried(candidate: Candidate, site: Site, generator: torch.Generator) -> Attempt:
    """All of the proof, if the candidate holds on the captured input."""
    tried = attempt(candidate, site, generator, thorough=False)
    return attempt(candidate, site, generator, thorough=True) if tried.proven else tried


def parts_of(calls: Mapping[str, Call], layer: str) -> dict[str, str]:
    """Paths of a layer's own modules through which the stream passes, with the role that each call shows."""
    width = calls[layer].hidden.shape[-1]
    found: dict[str, str] = {}
    for path, call in calls.items():
        inner = path.removeprefix(f"{layer}.")
        if not path.startswith(f"{layer}.") or "." in inner or not call.has_stream:
            continue
        if call.hidden.shape[-1] != width or call.result.shape != call.hidden.shape or call.later:
            continue
        vectors = all(parameter.ndim <= 1 for parameter in call.module.parameters())
        found[inner] = "norm" if vectors else "mixer" if mixes_tokens(call) else "ffn"
    return found
