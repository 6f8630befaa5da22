"""What the ranks of test_prefetch.py do: a training step whose collectives and computations are noted in order."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup

from dayzero.runtime.nn import CausalLM, Experts
from dayzero.runtime.parallel import Layout, Prefetch, make_meshes, parallelise
from dayzero.runtime.recompute import recompute
from dayzero.runtime.spec import ModelSpec

TOKENS = 12


def events(spec: str, prefetch: Prefetch, recomputed: bool) -> tuple[list[str], list[str]]:
    """Of the forward and the backward pass: "gather layer 1" when the parameters of layer 1 leave, "attention 1" and
    "experts 1" when these compute, "free experts 1" when their parameters are dropped."""
    with torch.device("meta"):
        model = ModelSpec.model_validate_json(spec).build()
    if recomputed:
        for layer in model.all_layers:
            recompute(layer)
    parallelise(model, make_meshes(Layout(1, 2, 1), "cpu"), prefetch=prefetch)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.1)
    log: list[str] = []
    names = _names(model)
    restore = _watch(log, names)
    _hear(model, log)
    ids = (torch.arange(TOKENS) * 5 + dist.get_rank()) % 300
    for _ in range(2):  # what FSDP sets up, it sets up in the first pass
        log.clear()
        loss = model(ids, torch.tensor([0, TOKENS]), ids.roll(-1))
        forward = log.copy()
        log.clear()
        loss.backward()
    restore()
    return forward, log


def units(spec: str) -> list[tuple[int, str]]:
    """Of every unit that is gathered as one: its parameters over all ranks, and the mesh that cuts it."""
    with torch.device("meta"):
        model = ModelSpec.model_validate_json(spec).build()
    parallelise(model, make_meshes(Layout(1, 2, 1), "cpu"))
    found = []
    for module in model.modules():
        if isinstance(module, FSDPModule):
            for group in module._get_fsdp_state()._fsdp_param_groups:
                size = sum(held.sharded_param.numel() for held in group.fsdp_params)
                found.append((size, "efsdp" if isinstance(module, Experts) else "dp_shard"))
    return sorted(found)


def _names(model: CausalLM) -> dict[int, str]:
    """By id of a group of parameters that are gathered together."""
    found = {}
    for number, layer in enumerate(model.all_layers):
        for module in layer.modules():
            if isinstance(module, FSDPModule):
                name = f"{'experts' if isinstance(module, Experts) else 'layer'} {number}"
                found |= {id(group): name for group in module._get_fsdp_state()._fsdp_param_groups}
    return found


def _watch(log: list[str], names: dict[int, str]) -> Callable[[], None]:
    unshard, reshard = FSDPParamGroup.unshard, FSDPParamGroup._to_sharded

    def unsharded(self, async_op=False):
        before = self._all_gather_result
        unshard(self, async_op)
        if before is None and self._all_gather_result is not None and id(self) in names:
            log.append(f"gather {names[id(self)]}")

    def resharded(self):
        if not self.is_sharded and id(self) in names:
            log.append(f"free {names[id(self)]}")
        reshard(self)

    FSDPParamGroup.unshard, FSDPParamGroup._to_sharded = unsharded, resharded

    def restore():
        FSDPParamGroup.unshard, FSDPParamGroup._to_sharded = unshard, reshard

    return restore


def _hear(model: CausalLM, log: list[str]) -> None:
    """Notes when parts compute, in both passes: what a part gives, and its gradient, are noted as it starts."""
    for number, layer in enumerate(model.layers):
        parts = {"attention": layer.mixer, "experts": layer.ffn.experts}
        for name, part in parts.items():
            part.register_forward_pre_hook(lambda *_, text=f"{name} {number}": log.append(text))
            part.register_full_backward_pre_hook(lambda *_, text=f"{name} {number}": log.append(text))
