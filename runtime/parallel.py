"""Data, expert, tensor and context parallelism: one set of ranks, seen as several meshes (mesh.py).

Dense parameters are sharded over dp_shard and replicated over dp_replicate (FSDP2); what tp cuts is sharded over the
ranks that hold the same part, all else over those of cp and tp too. Experts reuse all ranks as efsdp x ep: each of ep
neighbours holds its own experts, and efsdp ranks shard those. Gradients are summed, never averaged: the loss is already
divided by the valid tokens of the global batch, so all gradients come out right whatever the mesh.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dayzero.runtime.context_parallel import check_context_parallel
from dayzero.runtime.mesh import Layout, Meshes, divisors, make_meshes
from dayzero.runtime.nn import CausalLM, Experts, Routed
from dayzero.runtime.nn.expert_parallel import Exchange
from dayzero.runtime.tensor_parallel import check_alone, split_tensors

__all__ = ["Layout", "Meshes", "Prefetch", "divisors", "make_meshes", "parallelise", "split_experts"]

Prefetch = Literal[0, 1, 2]


def parallelise(
    model: CausalLM, meshes: Meshes, compute: torch.dtype | None = None, prefetch: Prefetch = 1
) -> CausalLM:
    """Shards the model in place, on whatever device it is (the meta device costs nothing), and returns it.

    compute: dtype of the forward and backward pass where it is not that of the parameters; gradients are then reduced
    in float32. prefetch: what is gathered before it is needed, see `prefetch_units`.
    """
    ep = meshes.experts["ep"]
    policy = (
        MixedPrecisionPolicy(param_dtype=compute, reduce_dtype=torch.float32) if compute else MixedPrecisionPolicy()
    )
    if meshes.split is not None:
        check_alone(model, *meshes.split.sizes)
        if meshes.split.cp is not None:
            check_context_parallel(model, meshes.split.cp.size())
        meshes.split.install(model)
    if meshes.cut is not None and meshes.split is not None:
        split_tensors(model, meshes.cut["tp"], meshes.split)
    for module in model.modules():
        if isinstance(module, Routed):
            split_experts(module.experts, ep)
            if ep.size() > 1:
                module.exchange = Exchange(ep.get_group(), dtype=compute)
    place = None if meshes.cut is None else _dense_placement(meshes.dense, meshes.cut)
    for layer in model.all_layers:
        for module in layer.modules():
            if isinstance(module, Experts):
                placement = _expert_placement(module, meshes.experts["efsdp"].size())
                fully_shard(module, mesh=meshes.experts["efsdp"], mp_policy=policy, shard_placement_fn=placement)
        fully_shard(layer, mesh=meshes.dense, mp_policy=policy, shard_placement_fn=place)
    for rotary in model.rotaries:
        if any(True for _ in rotary.parameters()):
            # Frequencies rounded to bfloat16 would turn far positions by other angles.
            fully_shard(rotary, mesh=meshes.dense, mp_policy=MixedPrecisionPolicy(), shard_placement_fn=place)
    fully_shard(model, mesh=meshes.dense, mp_policy=policy, shard_placement_fn=place)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    prefetch_units(model, prefetch)
    return model


def prefetch_units(model: CausalLM, prefetch: Prefetch) -> None:
    """What units ask for while they compute. 0: nothing, each is gathered when it is needed. 1: a layer for its experts
    and the next layer, so that experts travel while attention computes; in the backward pass, which reaches the experts
    first, the same with the layer before. 2: there experts ask for those of the layer before, too, which then travel
    while attention computes."""
    layers = [layer for layer in model.all_layers if isinstance(layer, FSDPModule)]
    inner = [
        [module for module in layer.modules() if isinstance(module, FSDPModule) and module is not layer]
        for layer in layers
    ]
    for number, (layer, experts) in enumerate(zip(layers, inner, strict=True)):
        after, before = layers[number + 1 : number + 2], layers[max(0, number - 1) : number]
        last = [*before, *(inner[number - 1] if number and prefetch == 2 else [])]
        layer.set_modules_to_forward_prefetch([*experts, *after] if prefetch else [])
        # Left alone, FSDP prefetches in the backward pass. A unit that asks for itself asks for nothing.
        layer.set_modules_to_backward_prefetch([*experts, *before] if prefetch else [layer])
        for module in experts:
            module.set_modules_to_backward_prefetch((last if prefetch else []) or [module])


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


def _dense_placement(dense: DeviceMesh, cut: DeviceMesh) -> Callable[[nn.Parameter], ShardPlacementResult]:
    """What tp cuts is sharded over the other ranks of its mesh, all else over every rank: two groups of one unit."""

    def info(mesh: DeviceMesh) -> FSDPMeshInfo:
        if mesh.ndim == 1:
            return FSDPMeshInfo(mesh, shard_mesh_dim=0)
        return HSDPMeshInfo(mesh, shard_mesh_dim=1, replicate_mesh_dim=0)

    whole, parts = info(dense), info(cut[("dp_replicate", "dp_shard")] if cut.ndim == 3 else cut["dp_shard"])
    return lambda parameter: ShardPlacementResult(Shard(0), parts if isinstance(parameter, DTensor) else whole)
