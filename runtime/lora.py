"""Low-rank adapters of linear layers (Hu et al. 2021, arXiv:2106.09685)."""

import math
from collections.abc import Sequence
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Generator, Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from dayzero.runtime.errors import InputError


class LoRALinear(nn.Linear):
    """y = W x + b + alpha/rank * B A dropout(x), where W and b are frozen.

    x: [..., in] -> [..., out]. `weight` W: [out, in] and `bias` b keep their names and dtype; `lora_a` A: [rank, in]
    and `lora_b` B: [out, rank] are in float32 at least. The product is cast to W's dtype before it is added.
    """

    def __init__(self, linear: nn.Linear, rank: int, alpha: float, dropout: float = 0.0):
        """Takes over the parameters of `linear`, on whichever device they are."""
        super().__init__(linear.in_features, linear.out_features, linear.bias is not None, device="meta")
        self.weight, self.bias = linear.weight, linear.bias
        self.rank, self.alpha, self.dropout = rank, alpha, dropout
        dtype = torch.promote_types(linear.weight.dtype, torch.float32)
        self.lora_a = nn.Parameter(linear.weight.new_zeros(rank, self.in_features, dtype=dtype))
        self.lora_b = nn.Parameter(linear.weight.new_zeros(self.out_features, rank, dtype=dtype))
        self.train(linear.training)

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight, self.bias)
        adapted = F.dropout(x, self.dropout, self.training).to(self.lora_a.dtype)
        return y + (F.linear(F.linear(adapted, self.lora_a), self.lora_b) * self.scale).to(y.dtype)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, alpha={self.alpha}, dropout={self.dropout}"


def apply_lora(
    model: nn.Module,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    targets: Sequence[str] | Literal["auto"] = "auto",
    generator: Generator | None = None,
) -> list[str]:
    """Gives linear layers an adapter, freezes everything else, and returns the adapted modules' names in order.

    targets: "auto" for every nn.Linear that its block names in `lora_targets`; else names, whole or from the end:
    "query", "mixer.query" and "layers.0.mixer.query" all mean that layer's query projection.
    The adapters start as nothing (B = 0; A by `reset_lora` from `generator`, seeded with 0 if None). On the meta
    device nothing is initialised: call `reset_lora` once the parameters are real.

    Raises InputError for a rank under 1, for a target that matches no linear layer, and for routed experts.
    """
    if rank < 1:
        raise InputError("lora.rank", found=str(rank), expected="1 or more")
    linears = _targets_of_blocks(model) if targets == "auto" else _targets_by_name(model, targets)
    model.requires_grad_(False)
    for name in linears:
        parent, _, child = name.rpartition(".")
        owner = model.get_submodule(parent)
        setattr(owner, child, LoRALinear(getattr(owner, child), rank, alpha, dropout))
    if not any(parameter.is_meta for parameter in model.parameters()):
        reset_lora(model, generator or torch.Generator().manual_seed(0))
    return linears


def reset_lora(model: nn.Module, generator: Generator) -> None:
    """A ~ U(-1/sqrt(in), 1/sqrt(in)) (He et al. 2015 with a = sqrt 5, as in PEFT), B = 0.

    The values depend on the generator (a CPU one) and the order of the modules, not on how the parameters are sharded.
    """
    for module in model.modules():
        if not isinstance(module, LoRALinear):
            continue
        a = torch.empty(module.lora_a.shape, dtype=module.lora_a.dtype, device="cpu")
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)
        with torch.no_grad():
            _fill(module.lora_a, a)
            _fill(module.lora_b, torch.zeros(module.lora_b.shape, dtype=module.lora_b.dtype, device="cpu"))


def merge(weight: Tensor, lora_a: Tensor, lora_b: Tensor, scale: float) -> Tensor:
    """W [out, in] + scale * lora_b [out, rank] lora_a [rank, in], in W's dtype; summed in float32 at least."""
    compute = torch.promote_types(weight.dtype, torch.promote_types(lora_a.dtype, torch.float32))
    delta = lora_b.to(compute) @ lora_a.to(compute)
    return (weight.to(compute) + scale * delta).to(weight.dtype)


def _fill(parameter: Tensor, value: Tensor) -> None:
    if isinstance(parameter, DTensor):
        mesh, placements = parameter.device_mesh, parameter.placements
        size, offset = compute_local_shape_and_global_offset(parameter.shape, mesh, placements)
        region = tuple(slice(start, start + length) for start, length in zip(offset, size, strict=True))
        parameter.to_local().copy_(value[region])
    else:
        parameter.copy_(value)


def _linears(model: nn.Module) -> list[str]:
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and not isinstance(module, LoRALinear)
    ]


def _targets_of_blocks(model: nn.Module) -> list[str]:
    wanted = {
        f"{name}.{target}" if name else target
        for name, module in model.named_modules()
        for target in getattr(module, "lora_targets", ())
    }
    if found := [name for name in _linears(model) if name in wanted]:
        return found
    raise InputError(
        "lora.targets", found="auto, and no block of this model names any", expected=f"one of {_choices(model)}"
    )


def _targets_by_name(model: nn.Module, targets: Sequence[str]) -> list[str]:
    found = set()
    for target in [targets] if isinstance(targets, str) else targets:
        matched = [name for name in _linears(model) if _ends_with(name, target)]
        if not matched:
            raise _no_match(model, target)
        found.update(matched)
    if not found:
        raise InputError("lora.targets", found="an empty list", expected=f"auto, or some of {_choices(model)}")
    return [name for name in _linears(model) if name in found]


def _ends_with(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _no_match(model: nn.Module, target: str) -> InputError:
    stacked = [name for name, parameter in model.named_parameters() if parameter.ndim == 3]
    owners = {name.rpartition(".")[0] for name in stacked}
    if any(_ends_with(name, target) for name in [*stacked, *owners]):
        return InputError(
            f"lora.targets: {target}",
            found="routed experts, which have no adapters yet",
            expected=f"auto, or some of {_choices(model)}",
            hint="To train the experts themselves use full fine-tuning.",
        )
    return InputError(
        f"lora.targets: {target}",
        found="no linear layer of that name",
        expected=f"auto, or some of {_choices(model)}",
    )


def _choices(model: nn.Module) -> str:
    return ", ".join(sorted({name.rpartition(".")[2] for name in _linears(model)})) or "(no linear layer at all)"
