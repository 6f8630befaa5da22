"""AdamW, and the norm and clipping of gradients that live on two meshes."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def make_optimizer(
    model: nn.Module, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) over the trainable parameters.

    Vectors (norms, biases) do not decay. Raises ValueError if nothing is trainable.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [parameter for parameter in trainable if parameter.ndim > 1], "weight_decay": weight_decay},
        {"params": [parameter for parameter in trainable if parameter.ndim <= 1], "weight_decay": 0.0},
    ]
    if not trainable:
        raise ValueError("no parameter of the model is trainable")
    return torch.optim.AdamW([group for group in groups if group["params"]], lr=lr, betas=betas, eps=eps)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together, a scalar equal on every rank, whatever mesh each parameter lives on.

    Every mesh spans all ranks, so one sum over ranks serves them all; a shard with copies counts once.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_copies.setdefault(_copies(parameter.grad), []).append(_local(parameter.grad))
    squares = [torch.nn.utils.get_total_norm(part).square() / copies for copies, part in by_copies.items()]
    if not squares:
        return torch.zeros(())
    total = torch.stack(squares).sum()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.sqrt()


def _copies(tensor: Tensor) -> int:
    """How many ranks hold the same shard."""
    if not isinstance(tensor, DTensor):
        return dist.get_world_size() if dist.is_initialized() else 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if placement.is_replicate())


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales all gradients by max_norm / norm where `norm`, their `gradient_norm`, is the larger."""
    if norm > max_norm:
        scale = max_norm / norm.item()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
