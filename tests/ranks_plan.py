"""What the ranks of test_plan.py do: hold a model as a run does, and count the bytes."""

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dayzero.runtime.async_save import Saver
from dayzero.runtime.config import Checkpoint, Optimizer
from dayzero.runtime.lora import apply_lora
from dayzero.runtime.nn import Experts
from dayzero.runtime.nn.index_loss import freeze_indexers
from dayzero.runtime.optimizer import make_optimizer
from dayzero.runtime.parallel import Layout, make_meshes, parallelise
from dayzero.runtime.precision import compute_dtype, keep_parameters
from dayzero.runtime.spec import ModelSpec


def held(
    spec: str, layout: tuple[int, ...], mode: str, precision, stored: torch.dtype, settings: Optimizer
) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes of parameters, gradients and optimizer on this rank after a step, by line of the plan; the same in host
    memory."""
    with torch.device("meta"):
        model = ModelSpec.model_validate_json(spec).build()
        if mode == "lora":
            apply_lora(model, 4, 8.0)
        freeze_indexers(model)
    keep_parameters(model, precision, {name: stored for name, _ in model.named_parameters()})
    parallelise(model, make_meshes(Layout(*layout), "cpu"), compute_dtype(precision))
    model.to_empty(device="cpu")
    experts = {id(p) for module in model.modules() if isinstance(module, Experts) for p in module.parameters()}
    for parameter in model.parameters():
        torch.nn.init.constant_(local(parameter), 0.01)
    for buffer in model.buffers():
        buffer.zero_()
    optimizer = make_optimizer(model, settings)
    ids = (torch.arange(8) * 7 + dist.get_rank()) % min(300, model.embed.num_embeddings)
    model(ids, torch.tensor([0, 8]), ids.roll(-1)).backward()
    optimizer.step()
    names = ("parameters_dense", "parameters_experts", "parameters_adapters", "buffers", "gradients", "optimizer")
    lines: dict[str, int] = dict.fromkeys(names, 0)
    lines["buffers"] = sum(buffer.nbytes for buffer in model.buffers())
    with tempfile.TemporaryDirectory() as run, Saver(Path(run), Checkpoint(), print) as saver:
        saver.save(1, model, optimizer)
        host = {"host_copy": sum(local(value).nbytes for value in saver.copies.values())}
    host |= {"host_moments": 0} if settings.offload else {}
    for name, parameter in model.named_parameters():
        line = "experts" if id(parameter) in experts else "adapters" if "lora_" in name else "dense"
        lines[f"parameters_{line}"] += local(parameter).nbytes
        if parameter.requires_grad:
            lines["gradients"] += local(parameter.grad).nbytes
            for key, value in optimizer.state[parameter].items():
                if settings.offload and key != "step":
                    host["host_moments"] += local(value).nbytes
                else:
                    lines["optimizer"] += local(value).nbytes
    return lines, host


def local(value) -> torch.Tensor:
    return (value.to_local() if isinstance(value, DTensor) else value).detach()
