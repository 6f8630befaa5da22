"""Notices a mixture of experts that does not compute what its own router says: reported, never fitted."""

from torch import Tensor

from dayzero.onboard.candidates.evidence import Site
from dayzero.onboard.candidates.expert_banks import Bank, banks
from dayzero.onboard.oracle.calls import tensors
from dayzero.onboard.oracle.gradients import gradients


def contradiction(site: Site) -> str | None:
    """What is wrong with the module, in one sentence; None where its experts are those that its router chooses.

    Experts that tokens were given to must be among those whose parameters the output depends on.
    """
    for bank in banks(site):
        chosen = _chosen(site, bank)
        if not chosen:
            continue
        used = _used(site, bank)
        if used and (unheard := sorted(chosen - used)):
            return (
                f"the reference contradicts itself: its router gives tokens to experts {_shown(sorted(chosen))}, "
                f"but only {_shown(sorted(used))} have any effect, not {_shown(unheard)}"
            )
    return None


def _chosen(site: Site, bank: Bank) -> set[int]:
    """Experts with a token, by the weights [T, E] that a module outside the bank gives and that are zero for most."""
    tokens = site.call.hidden[..., 0].numel()
    found: set[int] = set()
    for path, call in site.inner.items():
        if f"{path}.".startswith(f"{bank.owner}."):
            continue
        for value in tensors(call.output):
            weights = value.reshape(-1, value.shape[-1]) if value.ndim else value
            if weights.shape == (tokens, bank.experts) and bool(((weights != 0).sum(-1) <= bank.experts // 2).all()):
                found |= set(weights.abs().sum(0).nonzero().flatten().tolist())
    return found


def _used(site: Site, bank: Bank) -> set[int]:
    """Experts whose parameters have a gradient that is not zero."""
    parameters = {name: p for name, p in site.module.named_parameters() if name in bank.parameters and p.requires_grad}
    _, grads = gradients(lambda: site.call.replay(site.call.hidden).square().sum(), list(parameters.values()))
    by_name = dict(zip(parameters, grads, strict=True))
    return {number for number in range(bank.experts) if any(_of_expert(bank, by_name, number))}


def _of_expert(bank: Bank, grads: dict[str, Tensor], number: int) -> list[bool]:
    found = []
    for matrix in bank.matrices:
        if "{expert}" in matrix.name:
            grad = grads.get(matrix.name.replace("{expert}", str(number)))
        else:
            whole = grads.get(matrix.name)
            grad = whole.unflatten(0, (matrix.experts, -1))[number] if whole is not None else None
        found.append(grad is not None and bool(grad.any()))
    return found


def _shown(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))
