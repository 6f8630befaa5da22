"""Candidates for a routed mixture of experts, found by what flows: the router makes the index that experts receive."""

import itertools

import torch
from torch import Tensor

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal, size
from dayzero.onboard.candidates.feed_forward import activations
from dayzero.onboard.discover import Call, tensors
from dayzero.runtime.weights import Source, Stored, Transpose

SCORES = ("softmax", "sigmoid", "softmax_selected")


def propose_moe(site: Site) -> list[Candidate]:
    """Routers x experts: score function, renormalisation and its epsilon, scale, activation, layout of the experts."""
    containers = {path: call for path, call in site.inner.items() if _stacked(call)}
    if len(containers) != 1:
        return []
    experts_path, experts = next(iter(containers.items()))
    index = _expert_index(experts)
    if index is None:
        return []
    routers = {
        path: call
        for path, call in site.inner.items()
        if path != experts_path and any(_equal(tensor, index) for tensor in tensors(call.output))
    }
    matrices = [
        f"{path}.{name}"
        for path, call in routers.items()
        for name, parameter in call.module.named_parameters()
        if parameter.ndim == 2
    ]
    extra = [
        name for name, _ in site.module.named_parameters() if name not in matrices and not name.startswith(experts_path)
    ]
    if len(matrices) != 1 or extra:
        return []
    candidates = []
    top_k = _top_k(site, next(iter(routers)), index.shape[-1])
    for layout, act in itertools.product(_layouts(experts_path, experts, site), activations(site.operations)):
        for score, (renormalise, eps), scale in itertools.product(SCORES, _renormalisations(site), _scales(site)):
            if score == "softmax_selected" and renormalise.resolve(site.module, site.config):
                continue  # its weights sum to one already
            candidates.append(
                Candidate(
                    "MixtureOfExperts",
                    {
                        "hidden": size(matrices[0], 1),
                        "experts": size(matrices[0], 0),
                        "top_k": top_k,
                        "width": size(*layout.width),
                        "act": literal(act, "the trace's activation"),
                        "score": literal(score, "enumerated"),
                        "renormalise": renormalise,
                        "renormalise_eps": eps,
                        "scale": scale,
                    },
                    {"router.weight": Stored(matrices[0]), **layout.parameters},
                )
            )
    order = {"softmax": "softmax", "softmax_selected": "softmax", "sigmoid": "sigmoid"}
    return sorted(
        candidates,
        key=lambda c: order[c.arguments["score"].resolve(site.module, site.config)] not in site.operations.steps,
    )


def _stacked(call: Call) -> bool:
    """Whether the module itself holds three-dimensional parameters of one leading dimension."""
    shapes = [parameter.shape for parameter in call.module.parameters(recurse=False) if parameter.ndim == 3]
    return len(shapes) >= 2 and len({shape[0] for shape in shapes}) == 1


def _expert_index(experts: Call) -> Tensor | None:
    found = [tensor for tensor in tensors((experts.args, experts.kwargs)) if tensor.dtype == torch.int64]
    return found[0] if len(found) == 1 and found[0].ndim == 2 else None


def _equal(tensor: Tensor, index: Tensor) -> bool:
    return tensor.dtype == index.dtype and tensor.shape == index.shape and torch.equal(tensor, index)


class _Layout:
    def __init__(self, parameters: dict[str, Source], width: tuple[str, int, int]):
        self.parameters, self.width = parameters, width


def _layouts(path: str, experts: Call, site: Site) -> list[_Layout]:
    """gate_up [E, 2F, H] and down [E, H, F], each as it is or transposed, whichever the shapes allow."""
    hidden = site.call.hidden.shape[-1]
    named = [(f"{path}.{name}", p.shape) for name, p in experts.module.named_parameters(recurse=False) if p.ndim == 3]
    layouts = []
    for (first, one), (second, two) in itertools.permutations(named, 2):
        for first_flipped, second_flipped in itertools.product((False, True), repeat=2):
            rows, columns = reversed(one[1:]) if first_flipped else one[1:]
            height, width = reversed(two[1:]) if second_flipped else two[1:]
            if (columns, height, rows) != (hidden, hidden, 2 * width):
                continue
            gate_up: Source = Transpose(Stored(first)) if first_flipped else Stored(first)
            down: Source = Transpose(Stored(second)) if second_flipped else Stored(second)
            dim = 1 if second_flipped else 2
            layouts.append(_Layout({"experts.gate_up": gate_up, "experts.down": down}, (second, dim, 1)))
    return layouts


def _top_k(site: Site, router: str, observed: int) -> Evidence:
    explained = site.explain(observed)
    near = [evidence for evidence in explained if evidence.label.startswith(f"attribute {router}.")]
    return (near or explained or [literal(observed, "seen at the experts")])[0]


def _renormalisations(site: Site) -> list[tuple[Evidence, Evidence]]:
    """Whether the weights are divided by their sum, and what is added to it: 0, or a tiny constant of the trace."""
    zero = literal(0.0, "nothing is added")
    no = (literal(False, "enumerated"), zero)
    yes = [(literal(True, "enumerated"), zero)]
    for value in sorted(site.operations.constants):
        if 0 < value < 1e-5:
            eps = (site.explain(value) or [literal(value, "constant in the trace")])[0]
            yes.append((literal(True, "enumerated"), eps))
    return [*yes, no] if "div" in site.operations.steps else [no, *yes]


def _scales(site: Site) -> list[Evidence]:
    """Factors on the routing weights: 1, or a constant of the trace that a field explains."""
    one = literal(1.0, "no factor in the trace")
    explained = [site.explain(value)[:1] for value in sorted(site.operations.constants) if value > 1e-5]
    return [*(evidence for found in explained for evidence in found), one]
