"""Data and expert parallelism: one set of ranks, seen as two meshes.

Dense parameters are sharded over dp_shard and replicated over dp_replicate (FSDP2). Experts reuse the same ranks as
efsdp x ep, with efsdp * ep = dp_replicate * dp_shard: each of ep neighbours holds its own experts, and efsdp ranks
shard those. Gradients are summed, never averaged: the loss is already divided by the valid tokens of the global batch,
so dense and expert gradients come out right whatever the mesh.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dayzero.runtime.errors import InputError
from dayzero.runtime.nn import CausalLM, Experts, MixtureOfExperts
from dayzero.runtime.nn.expert_parallel import Exchange


@dataclass(frozen=True)
class Layout:
    """How the ranks are arranged. Raises InputError if the sizes do not fit together.

    dp_replicate * dp_shard ranks in all; ep neighbours share the experts of a layer.
    """

    dp_replicate: int
    dp_shard: int
    ep: int

    def __post_init__(self):
        for name in ("dp_replicate", "dp_shard", "ep"):
            if getattr(self, name) < 1:
                raise InputError(f"parallel.{name}", found=str(getattr(self, name)), expected="1 or more")
        if self.world % self.ep:
            raise InputError(
                "parallel.ep",
                found=str(self.ep),
                expected=f"a divisor of the {self.world} ranks",
                hint=f"Choose one of {divisors(self.world)}, or start another number of processes.",
            )

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard

    @property
    def efsdp(self) -> int:
        return self.world // self.ep

    def check_experts(self, counts: Sequence[int]) -> None:
        """Raises InputError unless the experts of every layer divide over ep. counts: experts of each MoE layer."""
        if self.ep > 1 and not counts:
            raise InputError("parallel.ep", found=str(self.ep), expected="1: this model has no routed experts")
        for count in counts:
            if count % self.ep:
                both = [size for size in divisors(self.world) if not any(count % size for count in counts)]
                raise InputError(
                    "parallel.ep",
                    found=str(self.ep),
                    expected=f"a divisor of the layer's {count} experts",
                    hint=f"On {self.world} ranks choose one of {both}.",
                )


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True)
class Meshes:
    """dense: dimensions (dp_replicate, dp_shard), or (dp_shard,) where nothing is replicated. experts: (efsdp, ep)."""

    dense: DeviceMesh
    experts: DeviceMesh


def make_meshes(layout: Layout, device: str) -> Meshes:
    """The two views of the process group, which must be initialised and of the layout's size. device: "cpu", ..."""
    shape, names = (layout.dp_replicate, layout.dp_shard), ("dp_replicate", "dp_shard")
    if layout.dp_replicate == 1:
        shape, names = shape[1:], names[1:]
    return Meshes(
        init_device_mesh(device, shape, mesh_dim_names=names),
        init_device_mesh(device, (layout.efsdp, layout.ep), mesh_dim_names=("efsdp", "ep")),
    )


def parallelise(model: CausalLM, meshes: Meshes, compute: torch.dtype | None = None) -> CausalLM:
    """Shards the model in place, on whatever device it is (the meta device costs nothing), and returns it.

    compute: dtype of the forward and backward pass where it is not that of the parameters; gradients are then reduced
    in float32.
    """
    ep = meshes.experts["ep"]
    policy = (
        MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32) if compute else MixedPrecisionPolicy()
    )
    for module in model.modules():
        if isinstance(module, MixtureOfExperts):
            split_experts(module.experts, ep)
            if ep.size() > 1:
                module.exchange = Exchange(ep.get_group(), dtype=compute)
    for layer in model.layers:
        for module in layer.modules():
            if isinstance(module, Experts):
                placement = _expert_placement(module, meshes.experts["efsdp"].size())
                fully_shard(module, mesh=meshes.experts["efsdp"], mp_policy=policy, shard_placement_fn=placement)
        fully_shard(layer, mesh=meshes.dense, mp_policy=policy)
    fully_shard(model, mesh=meshes.dense, mp_policy=policy)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return model


def split_experts(experts: Experts, ep: DeviceMesh) -> None:
    """Every parameter of `experts` becomes a DTensor with dimension 0, the expert, sharded over `ep`."""
    for path, parameter in list(experts.named_parameters()):
        owner, _, name = path.rpartition(".")
        split = distribute_tensor(parameter.data, ep, [Shard(0)], src_data_rank=None)
        experts.get_submodule(owner).register_parameter(name, nn.Parameter(split, parameter.requires_grad))


def _expert_placement(experts: Experts, efsdp: int):
    """Shard whole experts where every rank gets the same number, else slices of each: eight experts on 64 ranks would
    leave most ranks with none and a few with all."""
    local = [parameter.to_local() for parameter in experts.parameters() if isinstance(parameter, DTensor)]
    even = all(part.shape[0] % efsdp == 0 for part in local)
    sliceable = all(part.ndim > 1 and part.shape[1] % efsdp == 0 for part in local)
    return lambda parameter: Shard(0) if even or not sliceable else Shard(1)
