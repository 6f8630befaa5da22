"""What the ranks of test_plan.py do: hold a model as a run does, and count the bytes."""

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dayzero.runtime.config import Optimizer
from dayzero.runtime.lora import apply_lora
from dayzero.runtime.nn import Experts
from dayzero.runtime.optimizer import make_optimizer
from dayzero.runtime.parallel import Layout, make_meshes, parallelise
from dayzero.runtime.precision import compute_dtype, keep_parameters
from dayzero.runtime.spec import ModelSpec


def held(spec: str, layout: tuple[int, int, int], mode: str, precision, stored: torch.dtype) -> dict[str, int]:
    """Bytes of parameters, gradients and optimizer on this rank after a step, by line of the plan."""
    with torch.device("meta"):
        model = ModelSpec.model_validate_json(spec).build()
        if mode == "lora":
            apply_lora(model, 4, 8.0)
    keep_parameters(model, precision, {name: stored for name, _ in model.named_parameters()})
    parallelise(model, make_meshes(Layout(*layout), "cpu"), compute_dtype(precision))
    model.to_empty(device="cpu")
    experts = {id(p) for module in model.modules() if isinstance(module, Experts) for p in module.parameters()}
    for parameter in model.parameters():
        torch.nn.init.constant_(local(parameter), 0.01)
    optimizer = make_optimizer(model, Optimizer(lr=1e-3))
    ids = (torch.arange(8) * 7 + dist.get_rank()) % 300
    model(ids, torch.tensor([0, 8]), ids.roll(-1)).backward()
    optimizer.step()
    names = ("parameters_dense", "parameters_experts", "parameters_adapters", "gradients", "optimizer")
    lines = dict.fromkeys(names, 0)
    for name, parameter in model.named_parameters():
        line = "experts" if id(parameter) in experts else "adapters" if "lora_" in name else "dense"
        lines[f"parameters_{line}"] += local(parameter).nbytes
        if parameter.requires_grad:
            lines["gradients"] += local(parameter.grad).nbytes
            lines["optimizer"] += sum(local(value).nbytes for value in optimizer.state[parameter].values())
    return lines


def local(value) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()
