"""What every mixer with a state has to satisfy: documents packed end to end are documents alone."""

import torch

from dayzero.runtime.nn import Context
from dayzero.runtime.nn.context import positions_of

LENGTHS = (5, 1, 0, 70, 1, 33)  # odd ones, one token, none, and more than a chunk


def context(lengths: tuple[int, ...]) -> Context:
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    return Context(bounds, lengths, positions_of(lengths, bounds.device))


def drawn(block: torch.nn.Module, seed: int = 0, gain: float = 1.0, dtype: torch.dtype = torch.float64):
    """The block with random weights, vectors around one as redrawn references have them."""
    draw = torch.Generator().manual_seed(seed)
    block = block.to(dtype)
    with torch.no_grad():
        for parameter in block.parameters():
            noise = gain * torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            scaled = noise / parameter.shape[-1] ** 0.5 if parameter.ndim > 1 else 1 + 0.3 * noise
            parameter.copy_(scaled)
    return block


def values_and_gradients(function, inputs: dict[str, torch.Tensor], seed: int = 7) -> dict[str, torch.Tensor]:
    """The output, and what a random cotangent gives for every input."""
    leaves = {name: value.detach().clone().requires_grad_(True) for name, value in inputs.items()}
    out = function(**leaves)
    draw = torch.Generator().manual_seed(seed)
    cotangent = torch.randn(out.shape, generator=draw, dtype=torch.float64).to(out.dtype)
    grads = torch.autograd.grad(out, list(leaves.values()), cotangent)
    return {"output": out.detach(), **dict(zip(leaves, grads, strict=True))}


def worst(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    """The largest relative error; infinite where something is not finite."""
    errors = []
    for name, value in want.items():
        assert got[name].shape == value.shape, name
        error = float((got[name].double() - value.double()).norm() / value.double().norm().clamp_min(1e-300))
        errors.append(error if error == error else float("inf"))
    return max(errors)


def check_packed(block: torch.nn.Module, hidden: int, lengths: tuple[int, ...] = LENGTHS) -> None:
    """Outputs and gradients of packed documents are those of each document by itself."""
    draw = torch.Generator().manual_seed(3)
    x = torch.randn(sum(lengths), hidden, generator=draw, dtype=torch.float64)
    parameters = dict(block.named_parameters())

    def packed(x, **values):
        return torch.func.functional_call(block, values, (x, context(lengths)))

    def alone(x, **values):
        parts = [torch.func.functional_call(block, values, (d, context((len(d),)))) for d in x.split(lengths)]
        return torch.cat(parts)

    inputs = {"x": x, **parameters}
    assert worst(values_and_gradients(packed, inputs), values_and_gradients(alone, inputs)) < 1e-11
    assert block(x[:0], context(())).shape == (0, hidden)
