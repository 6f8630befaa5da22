"""Bytes that a rank receives in a training step, from shapes alone, for the units of `memory`."""

import math

from dayzero.runtime.planned_model import WIDE, Mesh, Model, Unit
from dayzero.runtime.shared_batch import moved_bytes


def communication(model: Model, mesh: Mesh, tokens: int, recompute: bool, per_node: int) -> dict[str, dict[str, int]]:
    """Bytes that rank 0 receives in a step, by kind: {"all_gather": {"inside": .., "across": ..}, ..}, nodes apart.

    A collective over n ranks of which p share a node brings S (p-1)/n from inside and S (n-p)/n from other nodes. The
    ranks of ep and dp_shard are neighbours; those of efsdp stand ep apart, those of dp_replicate dp_shard. S is for
    all_gather: c * the unit, twice (forward, backward) each time that it runs, but once for the root, which stays so.
    reduce_scatter: 4 * trained elements of the unit. all_reduce: 8 * trained elements kept, with dp_replicate.
    all_to_all: c T R H for each exchange, R rows a token (`Routed.rows_of_a_token`), whatever moves them: 2 forward, 2
    backward, 2 again with recompute. With tp or cp, T is T / (cp tp), the ranks of tp are neighbours and gather a
    unit's other parameters with those of cp and dp_shard, and shared_rows is what blocks gather and sum
    (`shared_batch`).
    """
    gather, scatter, reduce, exchange, shared = (_zero() for _ in range(5))
    together = mesh.tp * mesh.cp
    for unit, count in model.units_in(model.order):
        passes = 1 if unit is model.root else 2
        for ranks, stride, elements, _ in _gathered(unit, mesh):
            _add(gather, count * passes * model.compute * elements, ranks, stride, per_node)
    for unit, count in model.units:
        for ranks, stride, _, trained in _gathered(unit, mesh):
            _add(scatter, count * WIDE * trained, ranks, stride, per_node)
        if not unit.experts:
            local = sum(math.prod(shape) for p, shape in unit.local(mesh) if p.trained)
            _add(reduce, count * 2 * WIDE * local, mesh.dp_replicate, mesh.dp_shard * together, per_node)
    for i in model.order:
        over_tp, over_cp = moved_bytes(model.kinds[i].sharing, model.compute, tokens, mesh.tp, mesh.cp, recompute)
        _add(shared, over_tp, mesh.tp, 1, per_node)
        _add(shared, over_cp, mesh.cp, mesh.tp, per_node)
        for moe in model.kinds[i].moes:
            own = -(-tokens // together)
            size = int(model.compute * own * moe.rows_of_a_token(mesh.ep, model.dispatcher) * moe.experts.hidden)
            _add(exchange, (6 if recompute else 4) * size, mesh.ep, 1, per_node)
    kinds = {"all_gather": gather, "reduce_scatter": scatter, "all_reduce": reduce, "all_to_all": exchange}
    return kinds | ({"shared_rows": shared} if together > 1 else {})


def _gathered(unit: Unit, mesh: Mesh) -> list[tuple[int, int, int, int]]:
    """(ranks, how far apart they stand, elements, trained elements) of each group of parameters that is gathered."""
    if unit.experts:
        return [(mesh.efsdp, mesh.ep, unit.elements(mesh), unit.elements(mesh, trained_only=True))]
    whole = Unit(unit.name, tuple(p for p in unit.parameters if p.cut is None))
    cut = Unit(unit.name, tuple(p for p in unit.parameters if p.cut is not None))
    others = mesh.dp_shard * mesh.cp
    groups = [(whole, others * mesh.tp, 1), (cut, others, mesh.tp)]
    return [(n, apart, part.elements(mesh), part.elements(mesh, trained_only=True)) for part, n, apart in groups]


def _zero() -> dict[str, int]:
    return {"inside": 0, "across": 0}


def _add(total: dict[str, int], size: int, ranks: int, stride: int, per_node: int) -> None:
    together = min(ranks, max(1, per_node // stride))
    total["inside"] += size * (together - 1) // ranks
    total["across"] += size * (ranks - together) // ranks
