"""Candidates for a routed mixture of experts, found by what flows: the router makes the index that experts receive.

The block is solved part by part: experts for the index and the weights that they received, the router for the index and
the weights that it gave, then what stands around them. What is left is enumerated, and the prover decides.
"""

import itertools
from collections.abc import Callable, Iterator

import torch
from torch import nn

from dayzero.onboard.candidates.around_experts import expert_norm, surroundings, weighed_shared
from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal
from dayzero.onboard.candidates.expert_banks import banks
from dayzero.onboard.candidates.experts import propose_experts, run_experts
from dayzero.onboard.candidates.moe_parts import Parts, close, loaded
from dayzero.onboard.candidates.nesting import Inner
from dayzero.onboard.candidates.odd_routers import propose_odd_routers
from dayzero.onboard.candidates.router import dense, propose_router
from dayzero.onboard.candidates.stops import Cut, Stop

MOST = 64  # candidates handed to the prover


def propose_moe(site: Site) -> list[Candidate]:
    """Mixtures that agree, part by part, with what was captured inside the module."""
    return propose_moe_around(site, propose_routers)


def propose_moe_around(site: Site, routers: Callable[[Parts], Iterator[Candidate]]) -> list[Candidate]:
    """Mixtures with these routers, which are claims about the whole module."""
    # Experts that did not run are for other tokens than these.
    called = sorted(banks(site), key=lambda bank: bank.owner not in site.inner)
    if not called:
        return []
    every = _combined(Parts(site, called[0]), routers)
    proposed = list(itertools.islice(every, MOST))
    if left := sum(1 for _ in every):
        site.cuts.append(Cut(MOST, left))
    return proposed


def _combined(parts: Parts, routers_of: Callable[[Parts], Iterator[Candidate]]) -> Iterator[Candidate]:
    """Routers x experts x surroundings, those that hold on the captured values."""
    width = parts.expert_input.shape[1] if parts.expert_input is not None else parts.stream.shape[1]
    experts = list(_experts(parts, width))
    routers = [_with_block_scale(parts, router) for router in routers_of(parts)] if experts else []
    if not routers and parts.site.stops is not None:
        what, names, path = "its experts", tuple(sorted(parts.bank.parameters)), parts.bank.owner
        if experts:
            what, path = "its router", parts.router_path
            names = tuple(name for name in parts.free if name.startswith(f"{path}.") or not path)
        parts.site.stops.append(Stop("MixtureOfExperts", {what: names}, path))
    for router, container, around in itertools.product(routers, experts, list(surroundings(parts, width))):
        arguments, parameters = around
        held = {"router": router, "experts": container, **arguments}
        if router.block == "JointRouter":
            if (weighed := weighed_shared(parts)) is None:
                continue
            held["shared"] = weighed
        for extra in _readings(parts, router, container):
            yield Candidate("MixtureOfExperts", {**held, **extra}, dict(parameters))


def _experts(parts: Parts, width: int) -> Iterator[Candidate]:
    inner = Inner(parts.site, parts.bank.owner if parts.container is not None else "")
    norm = expert_norm(parts)
    for candidate in propose_experts(inner, parts.bank, width):
        if parts.index is None or parts.weights is None or parts.expert_input is None or norm is not None:
            yield candidate
            continue
        block = loaded(candidate, parts.site)
        assert parts.container is not None
        if block is None:
            continue
        got = run_experts(block, parts.expert_input, parts.index, parts.weights)  # type: ignore[arg-type]
        spare = parts.index >= parts.bank.experts
        beyond = parts.expert_input * (parts.weights * spare).sum(-1, keepdim=True)
        if close(got, parts.container.result) or close(got + beyond, parts.container.result):
            yield candidate


def propose_routers(parts: Parts) -> Iterator[Candidate]:
    """Routers over the parts of a module that route as it was seen to, as far as that was seen."""
    hidden = parts.stream.shape[1]
    if not parts.bank.owner and parts.index is not None:
        yield from _handed(parts, parts.index.shape[1])
        return
    inner = Inner(parts.site, parts.router_path)
    prefix = f"{parts.router_path}." if parts.router_path else ""
    linears = {f"{path}.weight" for path, call in parts.site.inner.items() if isinstance(call.module, nn.Linear)}
    own = {name: tensor for name, tensor in parts.free.items() if name.startswith(prefix)}
    loose = {name: tensor for name, tensor in parts.free.items() if name.rpartition(".")[0] not in linears}
    matrices = [
        name
        for name, tensor in own.items()
        if tensor.ndim == 2 and tensor.is_floating_point() and tensor.shape[1] == hidden and tensor.shape[0] > 1
    ]
    vectors = {
        name: tensor.numel()
        for name, tensor in {**own, **loose}.items()
        if tensor.is_floating_point() and tensor.numel() == max(tensor.shape, default=0)
    }
    top_k = None if parts.index is None else parts.index.shape[1]
    made = [candidate for matrix in matrices for candidate in propose_router(inner, matrix, vectors, hidden)]
    made += propose_odd_routers(inner, matrices, vectors, parts.bank.experts, top_k)
    for candidate in made:
        block = loaded(candidate, parts.site)
        if block is None:
            continue
        if parts.index is None or parts.weights is None or _routes_alike(block, parts):
            yield candidate


def _handed(parts: Parts, top_k: int) -> Iterator[Candidate]:
    """The module is told index and weights by a sibling. How many it is told is a setting of the model: the fields with
    that number, those first whose name speaks of choosing."""
    fields = [evidence for evidence in parts.site.explain(top_k) if evidence.label.startswith("config ")]
    fields.sort(key=lambda evidence: not any(word in evidence.label for word in ("top", "per_tok")))
    experts = Evidence("the stacked matrices", lambda module, config: next(iter(module.parameters())).shape[0])
    count = fields[0] if fields else literal(top_k, "seen at the experts")
    yield Candidate("HandedRouting", {"experts": experts, "top_k": count}, {})


def _routes_alike(block: nn.Module, parts: Parts) -> bool:
    assert parts.index is not None
    assert parts.weights is not None
    with torch.no_grad():
        try:
            weights, index = block(parts.stream, parts.site.context)
        except (RuntimeError, ValueError):
            return False
    classes = max(int(block.experts), int(parts.index.max()) + 1)  # type: ignore[arg-type]
    if index.shape != parts.index.shape:
        return False
    got = dense(index, weights[:, : index.shape[1]], classes)
    want = dense(parts.index, parts.weights, classes)
    spare = got[:, parts.bank.experts :]
    if close(got, want):
        return True
    # The weights of classes without an expert may have been set to zero on their way.
    got[:, parts.bank.experts :] = torch.where(want[:, parts.bank.experts :] == 0, 0.0, spare)
    return close(got, want)


def _with_block_scale(parts: Parts, router: Candidate) -> Candidate:
    """A factor on the routed sum, which is the same as one on every weight."""
    if "scale" in router.arguments or parts.container is None or router.block not in {"Router", "HashRouter"}:
        return router
    result = parts.container.result
    whole = Inner(parts.site, "")
    sequence = whole.operations.sequence
    inside = Inner(parts.site, parts.bank.owner).operations.sequence
    own = {step.numbers for step in inside if step.name == "mul" and step.shape[-1:] == result.shape[-1:]}
    for step in sequence:
        outside = step.name == "mul" and step.numbers and step.shape[-1:] == result.shape[-1:]
        if outside and step.numbers not in own:
            value = step.numbers[-1]
            found = whole.cause(value)
            if value != 1.0 or found.label.startswith("attribute"):
                return Candidate(router.block, {**router.arguments, "scale": found}, router.parameters, router.when)
    return router


def _readings(parts: Parts, router: Candidate, container: Candidate) -> Iterator[dict[str, Evidence | Candidate]]:
    """Where the weights enter, and what classes without an expert give."""
    classes = router.arguments["experts"].resolve(parts.site.module, parts.site.config)
    weighed: list[dict[str, Evidence | Candidate]] = [{}]
    if parts.weights is None:
        weighed.append({"weigh": literal("input", "enumerated")})
    spare: list[dict[str, Evidence | Candidate]] = [{}]
    if isinstance(classes, int) and classes > parts.bank.experts:
        spare.append({"spare": literal("identity", "enumerated")})
    for a, b in itertools.product(weighed, spare):
        yield {**a, **b}
