"""Candidates for attention whose first and last projections are routed experts: experts and router as in a mixture of
experts, keys, values and the softmax as in an attention."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import Tensor

from dayzero.onboard.candidates.attention import AttentionSolver
from dayzero.onboard.candidates.equality import CLOSE
from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal
from dayzero.onboard.candidates.expert_banks import Bank, banks
from dayzero.onboard.candidates.experts import layouts
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.onboard.candidates.moe import propose_routers
from dayzero.onboard.candidates.moe_parts import Parts
from dayzero.onboard.candidates.softmax import SoftmaxSeen, watch
from dayzero.onboard.candidates.where_held import constant, named
from dayzero.onboard.oracle.calls import same
from dayzero.runtime.weights import Source, Stored


def propose_mixture_of_attention(site: Site) -> list[Candidate]:
    """Mixtures of attention heads whose keys and values are what the softmax was given."""
    found = [bank for bank in banks(site) if len(bank.matrices) == 2]
    if not found or site.call.hidden.ndim != 3:
        return []
    return [candidate for seen in watch(site.call) for candidate in _of_bank(site, found[0], seen)]


def _of_bank(site: Site, bank: Bank, seen: SoftmaxSeen) -> Iterator[Candidate]:
    parts = Parts(site, bank)
    hidden = site.call.hidden.shape[-1]
    routers = list(propose_routers(parts))
    held = [layout for layout in layouts(bank, hidden) if not layout.is_gated and not layout.bias]
    for router, layout in itertools.product(routers, held):
        experts: dict[str, Evidence | Candidate] = {
            "experts": layout.experts,
            "hidden": layout.hidden,
            "width": layout.width,
            "act": literal(None, "attention stands between the projections"),
            "is_gated": literal(False, "the shapes"),
        }
        container = Candidate("Experts", experts, layout.parameters)
        choices: Any = router.arguments["top_k"].resolve(site.module, site.config)
        for arguments, parameters in _attention(site, seen, choices):
            yield Candidate(
                "MixtureOfAttention",
                {"router": router, "experts": container, **arguments, **_bias(parts, hidden)[0]},
                {**parameters, **_bias(parts, hidden)[1]},
            )


def _attention(
    site: Site, seen: SoftmaxSeen, choices: int
) -> Iterator[tuple[dict[str, Evidence | Candidate], dict[str, Source]]]:
    """What makes keys and values, and the scores; nothing for a softmax that is more than the block's."""
    linears = {path: call for path, call in linear_calls(site).items() if same(call.hidden, site.call.hidden)}
    heads = seen.query.shape[1]
    if not linears or heads % choices:
        return
    solver = AttentionSolver(site, linears, next(iter(linears)), _by_head(seen, heads // choices))
    scores = solver._scores()
    if solver.kv_heads != heads // choices or solver._visibility() != [{}] or scores is None or scores[1] is not None:
        return
    scale = 1.0 if abs(scores[0] - 1.0) <= CLOSE else constant(site, scores[0])
    count = named(site, solver.kv_heads, ("key_value", "kv", "heads"))
    for (road, ratio), (more, value, factor) in itertools.product(
        solver._roads(solver.key, positions=False), list(solver._values())
    ):
        plain = road.norm is None and road.clip is None and not road.last and not more
        if scale is None or not plain or max(abs(float(ratio.flatten()[0]) - 1.0), abs(factor - 1.0)) > CLOSE:
            continue
        yield (
            {
                "kv_heads": count or literal(solver.kv_heads, "heads that differ in the softmax's input"),
                "scale": literal(1.0, "the scores are the products")
                if scale == 1.0
                else solver._number(scale, ("scal",)),
                "rotary": literal(road.style, "what the softmax was given"),
                **({"table": literal(road.table, "the tables that the softmax's input shows")} if road.table else {}),
            },
            {**solver._projection("key", road.piece), **value},
        )


def _by_head(seen: SoftmaxSeen, kv_heads: int) -> SoftmaxSeen:
    """The softmax with all choices of a key's head side by side, where the keys are repeated one set after another."""

    def moved(part: Tensor) -> Tensor:
        return part.unflatten(1, (-1, kv_heads)).transpose(1, 2).flatten(1, 2)

    sets = seen.key.unflatten(1, (-1, kv_heads))
    if not bool((sets == sets[:, :1]).all()):
        return seen
    return replace(
        seen,
        query=moved(seen.query),
        key=moved(seen.key),
        value=moved(seen.value),
        attended=moved(seen.attended),
        scores=moved(seen.scores),
    )


def _bias(parts: Parts, hidden: int) -> tuple[dict[str, Evidence], dict[str, Source]]:
    """A vector on the sum, where there is one as long as the stream."""
    found = [name for name, tensor in parts.free.items() if tensor.ndim == 1 and tensor.numel() == hidden]
    if len(found) != 1:
        return {}, {}
    return {"bias": literal(True, f"the parameter {found[0]}")}, {"bias": Stored(found[0])}
