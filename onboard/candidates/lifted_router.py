"""Mixtures whose experts are ours and whose router is the reference's own code: for routers that nobody has seen."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal
from dayzero.onboard.candidates.lifted import LiftedCandidate, propose_lifted
from dayzero.onboard.candidates.moe import propose_moe_around
from dayzero.onboard.candidates.moe_parts import Parts
from dayzero.onboard.candidates.nesting import site_below
from dayzero.runtime.weights import Source


def propose_moe_with_lifted_router(site: Site) -> list[Candidate]:
    """[] where the module has no routed experts, or no module of its own that gives their index and weights."""
    return propose_moe_around(site, _lifted_routers)


def _lifted_routers(parts: Parts) -> Iterator[Candidate]:
    if not parts.router_path or parts.index is None or parts.weights is None:
        return
    output = parts.site.inner[parts.router_path].output
    index, weights = _path_of(output, parts.index), _path_of(output, parts.weights)
    if index is None or weights is None:
        return
    for made in propose_lifted(site_below(parts.site, parts.router_path)):
        assert isinstance(made, LiftedCandidate)
        parameters: dict[str, Source] = {f"code.{name}": source for name, source in made.parameters.items()}
        arguments = {name: argument for name, argument in made.arguments.items() if name != "replace"}
        arguments |= {"weights": literal(weights, "its output"), "index": literal(index, "its output")}
        router = LiftedCandidate("LiftedRouter", arguments, parameters, None, made.lift, made.reads_tables)
        below = router.below(parts.router_path)
        sizes = {
            "experts": _number(parts.site, parts.bank.experts, ("expert",)),
            "top_k": _number(parts.site, parts.index.shape[1], ("top", "per_tok")),
        }
        yield replace(below, arguments={**below.arguments, **sizes})


def _number(site: Site, value: int, words: tuple[str, ...]) -> Evidence:
    """A setting of the model with this value, those first whose name speaks of it."""
    found = [evidence for evidence in site.explain(value) if evidence.label.startswith("config ")]
    found.sort(key=lambda evidence: not any(word in evidence.label for word in words))
    return found[0] if found else literal(value, "seen at the experts")


def _path_of(output: Any, wanted: Tensor) -> list[int] | None:
    """Where in what a module returned the tensor stands, row by token; None where it does not."""
    if isinstance(output, Tensor):
        same = output.dtype == wanted.dtype and output.numel() == wanted.numel()
        return [] if same and bool((output.reshape(wanted.shape) == wanted).all()) else None
    held = list(output.values()) if isinstance(output, Mapping) else output
    for place, value in enumerate(held if isinstance(held, (tuple, list)) else ()):
        path = _path_of(value, wanted)
        if path is not None:
            return [place, *path]
    return None
