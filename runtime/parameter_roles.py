"""What a parameter is to the optimizer, by the module that owns it."""

from dataclasses import dataclass
from typing import Literal, get_args

from torch import nn

Role = Literal["matrices", "experts", "router", "embedding", "head", "vectors", "lora", "other"]
ROLES: tuple[Role, ...] = get_args(Role)


@dataclass(frozen=True)
class Trained:
    """A trainable parameter. joined: matrices that it holds one below the other, such as the gate's and the value's."""

    name: str
    parameter: nn.Parameter
    role: Role
    joined: int = 1


_INSIDE: tuple[Role, ...] = ("router", "experts")  # children of a routed mixture


def trained_parameters(model: nn.Module) -> list[Trained]:
    """Every trainable parameter once, in the model's order, with its role:

    matrices: weights of linear layers. experts: stacked matrices [E, ., .] of routed experts. router: its matrices.
    embedding, head: over the vocabulary; a tied head is the embedding. vectors: norms, biases, one value a head, also
    stacked over experts. lora: adapters. other: what is left, such as a convolution's kernel.

    A block names parameters that hold several matrices as joined_matrices = {"gate_up": 2}.
    """
    inside: dict[int, Role] = {}
    for module in model.modules():
        for child in _INSIDE:
            part = getattr(module, child, None)
            if isinstance(part, nn.Module):
                inside.update({id(parameter): child for parameter in part.parameters()})
    head = getattr(model, "head", None)
    found: dict[int, Trained] = {}
    for path, module in model.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.requires_grad and id(parameter) not in found:
                full = f"{path}.{name}" if path else name
                role = "head" if module is head else _role(name, parameter, module, inside.get(id(parameter)))
                found[id(parameter)] = Trained(
                    full, parameter, role, getattr(module, "joined_matrices", {}).get(name, 1)
                )
    return list(found.values())


def _role(name: str, parameter: nn.Parameter, module: nn.Module, inside: Role | None) -> Role:
    if name.endswith(("lora_a", "lora_b")):
        return "lora"
    if parameter.ndim <= 1 or (inside == "experts" and parameter.ndim == 2 and not isinstance(module, nn.Linear)):
        return "vectors"
    if inside:
        return inside
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "matrices" if isinstance(module, nn.Linear) else "other"
