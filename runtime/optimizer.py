"""AdamW and Muon over parameter groups by role, and the norm and clipping of gradients that live on several meshes."""

import math
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.adamw import adamw

from dayzero.runtime import config, muon
from dayzero.runtime.errors import InputError
from dayzero.runtime.moments import Moments, Noise, local
from dayzero.runtime.parameter_roles import Role, trained_parameters

MUON_ROLES: tuple[Role, ...] = ("matrices", "experts")
MATRIX_ROLES: tuple[Role, ...] = (*MUON_ROLES, "router", "embedding", "head", "lora")
CHUNK = 1 << 24  # elements of a moment that exist in float32 at a time where it is stored in another form
FUSED = ("cpu", "cuda")


class Optimizer(torch.optim.Optimizer):
    """AdamW (Loshchilov and Hutter 2019, arXiv:1711.05101) or Muon (see muon.py), a group at a time.

    A group has params and role, algorithm ("adamw" or "muon"), lr, lr_factor, weight_decay; for AdamW betas and eps;
    for Muon momentum and joined, one number for each parameter. State stands under torch's names: step, exp_avg,
    exp_avg_sq; momentum_buffer.
    """

    def __init__(self, groups: list[dict[str, Any]], moments: Moments, compute: torch.dtype):
        """compute: dtype in which Muon orthogonalises."""
        super().__init__(groups, {})
        self.moments, self.compute = moments, compute

    def prepare(self, parameter: nn.Parameter) -> None:
        """State of a parameter that has not moved yet: zeros."""
        group = next(group for group in self.param_groups if any(parameter is other for other in group["params"]))
        state = self.state[parameter]
        state["step"] = torch.zeros((), device=parameter.device)
        for name in _NAMES[group["algorithm"]]:
            state.update(self.moments.zeros(parameter, name))

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            moved = [parameter for parameter in group["params"] if parameter.grad is not None]
            for parameter in moved:
                if not self.state[parameter]:
                    self.prepare(parameter)
            if group["algorithm"] == "muon":
                self._muon(moved, group)
            elif self.moments.in_place:
                self._adamw_at_once(moved, group)
            else:
                for parameter in moved:
                    self._adamw_in_rows(parameter, group)

    def set_lr(self, lr: float) -> None:
        """lr: of groups whose factor is 1."""
        for group in self.param_groups:
            group["lr"] = lr * group["lr_factor"]

    def _adamw_at_once(self, moved: list[nn.Parameter], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in moved]
        _adamw(
            [local(parameter) for parameter in moved],
            [_gradient(parameter) for parameter in moved],
            [local(state["exp_avg"]) for state in states],
            [local(state["exp_avg_sq"]) for state in states],
            [state["step"] for state in states],
            group,
        )

    def _adamw_in_rows(self, parameter: nn.Parameter, group: dict[str, Any]) -> None:
        """Moments that are stored in another form are read, used and written a few rows at a time."""
        state, values, grad = self.state[parameter], local(parameter), _gradient(parameter)
        noise = self._noise(parameter, "exp_avg"), self._noise(parameter, "exp_avg_sq")
        before = state["step"].clone()
        for rows in _rows(parameter):
            state["step"].copy_(before)
            first = self.moments.read(state, "exp_avg", values.device, rows, root=False)
            second = self.moments.read(state, "exp_avg_sq", values.device, rows, root=True)
            _adamw([values[rows]], [grad[rows]], [first], [second], [state["step"]], group)
            self.moments.write(state, "exp_avg", first, rows, root=False, noise=noise[0])
            self.moments.write(state, "exp_avg_sq", second, rows, root=True, noise=noise[1])

    def _muon(self, moved: list[nn.Parameter], group: dict[str, Any]) -> None:
        joined = dict(zip(map(id, group["params"]), group["joined"], strict=True))
        updates = [muon.Update(p, self._momentum(p, group["momentum"]), joined[id(p)]) for p in moved]
        for parameter, part in zip(moved, muon.orthogonalise(updates, self.compute), strict=True):
            value = local(parameter)
            value.mul_(1 - group["lr"] * group["weight_decay"]).add_(part, alpha=-group["lr"])

    def _momentum(self, parameter: nn.Parameter, momentum: float) -> Tensor:
        """This rank's part of the momentum one step ahead, in the dtype of `compute`."""
        state, grad = self.state[parameter], _gradient(parameter)
        state["step"] += 1
        noise = self._noise(parameter, "momentum_buffer")
        ahead = torch.empty_like(grad, dtype=self.compute)
        for rows in _rows(parameter):
            mean = self.moments.read(state, "momentum_buffer", grad.device, rows, root=False)
            mean.lerp_(grad[rows], 1 - momentum)
            ahead[rows] = grad[rows].lerp(mean, momentum)
            self.moments.write(state, "momentum_buffer", mean, rows, root=False, noise=noise)
        return ahead

    def _noise(self, parameter: nn.Parameter, name: str) -> Noise:
        steps = int(self.state[parameter]["step"]) if self.moments.kind(parameter) != "fp32" else 0
        return Noise(parameter, 2 * steps + (name == "exp_avg_sq"))


_NAMES = {"adamw": ("exp_avg", "exp_avg_sq"), "muon": ("momentum_buffer",)}


def make_optimizer(model: nn.Module, settings: config.Optimizer) -> Optimizer:
    """The optimizer of the model's trainable parameters, one group for each role that it has.

    Raises ValueError if nothing is trainable, InputError for a setting of a role that the model does not have or that
    Muon cannot be used for.
    """
    trained = trained_parameters(model)
    if not trained:
        raise ValueError("no parameter of the model is trainable")
    roles: list[Role] = list(dict.fromkeys(one.role for one in trained))
    if absent := [role for role in settings.groups if role not in roles]:
        raise InputError(
            f"optimizer.groups: {absent[0]}",
            found="no trained parameter of that role",
            expected=f"some of {', '.join(roles)}",
        )
    groups = []
    for role in roles:
        members = [one for one in trained if one.role == role]
        group = _group(role, settings)
        groups.append(
            {**group, "params": [one.parameter for one in members], "joined": [one.joined for one in members]}
        )
    wide = trained[0].parameter
    compute = torch.bfloat16 if wide.device.type != "cpu" and wide.dtype == torch.float32 else wide.dtype
    return Optimizer(groups, Moments(settings.states, settings.offload), compute)


def algorithm_of(role: Role, settings: config.Optimizer) -> str:
    """adamw or muon."""
    own = settings.groups.get(role, config.Group())
    return own.name or (settings.name if role in MUON_ROLES else "adamw")


def moments_of(role: Role, settings: config.Optimizer) -> int:
    """How many moments a parameter of that role has."""
    return len(_NAMES[algorithm_of(role, settings)])


def _group(role: Role, settings: config.Optimizer) -> dict[str, Any]:
    own, algorithm = settings.groups.get(role, config.Group()), algorithm_of(role, settings)
    if algorithm == "muon" and role not in MATRIX_ROLES:
        raise InputError(
            f"optimizer.groups: {role}",
            found="muon, which needs matrices",
            expected=f"muon for some of {', '.join(MATRIX_ROLES)}",
        )
    decay = 0.0 if role == "vectors" else settings.weight_decay
    return {
        "role": role,
        "algorithm": algorithm,
        "lr": settings.lr * own.lr,
        "lr_factor": own.lr,
        "weight_decay": decay if own.weight_decay is None else own.weight_decay,
        "betas": settings.betas,
        "eps": settings.eps,
        "momentum": settings.momentum,
    }


def _adamw(values, grads, firsts, seconds, steps, group: dict[str, Any]) -> None:
    if values:
        fused = values[0].device.type in FUSED
        beta1, beta2 = group["betas"]
        adamw(
            values, grads, firsts, seconds, [], steps, fused=fused, foreach=not fused, amsgrad=False, maximize=False,
            beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
        )  # fmt: skip


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return local(parameter.grad)


def _rows(parameter: Tensor) -> Iterator[slice]:
    """Slices of dimension 0 of this rank's part, with about CHUNK elements each; at least one, if of nothing. Ranks
    that share rows have the same slices: they may have to agree on something (`moments`)."""
    count = max(1, CHUNK * parameter.shape[0] // max(1, parameter.numel()))
    for start in range(0, max(1, local(parameter).shape[0]), count):
        yield slice(start, start + count)


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """The 2-norm of all gradients together, a scalar equal on every rank, whatever mesh each parameter lives on.

    One sum over all ranks serves every mesh; a shard with copies counts once.
    """
    by_copies: dict[int, list[Tensor]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_copies.setdefault(_copies(parameter.grad), []).append(local(parameter.grad))
    squares = [torch.nn.utils.get_total_norm(part).square() / copies for copies, part in by_copies.items()]
    if not squares:
        return torch.zeros(())
    total = torch.stack(squares).sum()
    if dist.is_initialized():
        dist.all_reduce(total)
    return total.sqrt()


def _copies(tensor: Tensor) -> int:
    """How many ranks hold the same shard: those that no dimension of its mesh tells apart."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if not isinstance(tensor, DTensor):
        return world
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return world // math.prod(size for size, placement in sizes if not placement.is_replicate())


def clip_gradients(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scales all gradients by max_norm / norm where `norm`, their `gradient_norm`, is the larger."""
    if norm > max_norm:
        scale = max_norm / norm.item()
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(scale)
