"""Bytes that the layers of a model keep for their backward pass, and what they need beside that while they compute.

Each layer is run once without values (`dry_pass`). Attention and the operators of the registry are taken to be their
fused forms. A batch is one document, the longest that it could hold. Routed copies are taken to be spread evenly, times
UNEVEN on the ranks of an exchange.
"""

from torch import nn

from dayzero.runtime.dry_pass import LayerBytes, layer_bytes
from dayzero.runtime.nn import CausalLM, Routed
from dayzero.runtime.travelling import UNEVEN

MEASURED = 8192  # tokens of the longest pass; longer ones follow by a parabola, since attention may be quadratic


def measure_layers(model: CausalLM, tokens: int) -> list[LayerBytes]:
    """For every layer of a model on the meta device, in the dtype of the pass."""
    try:
        if tokens <= MEASURED:
            return layer_bytes(model, tokens)
        points = (MEASURED // 4, MEASURED // 2, MEASURED)
        passes = zip(*(layer_bytes(model, point) for point in points), strict=True)
        return [_extended(points, values, tokens) for values in passes]
    except (NotImplementedError, RuntimeError, ValueError, TypeError, KeyError, IndexError):
        # Lifted code may look at values, which there are none of.
        compute = model.embed.weight.element_size()
        return [_estimate(layer, compute, tokens, model.embed.weight.shape[1]) for layer in model.all_layers]


def kept(layer: LayerBytes, ep: int) -> int:
    """Alive between the two passes; with an exchange, experts hold the copies of a busy rank."""
    return layer.kept + (int((UNEVEN - 1) * layer.by_experts) if ep > 1 else 0)


def working(layer: LayerBytes, ep: int) -> int:
    """On top of that at the worst moment."""
    return int(layer.working * UNEVEN) if ep > 1 and layer.by_experts else layer.working


def _extended(points: tuple[int, int, int], values: tuple[LayerBytes, ...], tokens: int) -> LayerBytes:
    """The parabola through three passes (Lagrange), which does not fall under the line through zero and the last."""
    weights = []
    for here in points:
        others = [point for point in points if point != here]
        weights.append((tokens - others[0]) * (tokens - others[1]) / ((here - others[0]) * (here - others[1])))
    made = {}
    for name in vars(values[0]):
        parts = [getattr(value, name) for value in values]
        curve = sum(weight * part for weight, part in zip(weights, parts, strict=True))
        made[name] = int(max(curve, parts[-1] * tokens / points[-1]))
    return LayerBytes(**made)


def _estimate(layer: nn.Module, compute: int, tokens: int, hidden: int) -> LayerBytes:
    """From the sizes alone: inputs and outputs of all projections, and as much again to work with."""
    linears = sum(m.in_features + m.out_features for m in layer.modules() if isinstance(m, nn.Linear))
    experts = [(m.router.top_k, m.experts) for m in layer.modules() if isinstance(m, Routed)]
    inside = sum(top_k * (3 * held.width + 2 * held.hidden) for top_k, held in experts)
    kept_bytes = compute * tokens * (linears + inside + 2 * hidden)
    routing = sum(12 * tokens * top_k for top_k, _ in experts)
    return LayerBytes(kept_bytes, compute * tokens * inside, compute * tokens * hidden, routing, kept_bytes)
