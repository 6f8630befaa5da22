"""What the ranks of test_lora.py do."""

import torch
from torch import Tensor
from torch.distributed import get_world_size
from torch.distributed.tensor import DTensor

from dayzero.runtime.lora import apply_lora, reset_lora
from dayzero.runtime.nn.causal_lm import initialise
from dayzero.runtime.parallel import Layout, make_meshes, parallelise
from dayzero.runtime.spec import ModelSpec


def step(spec: str, base: torch.dtype, compute: torch.dtype | None) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """(adapters as they start and base, gradients), whole, of a model sharded over all ranks with ep 2 where it can."""
    model = ModelSpec.model_validate_json(spec).build().to(base)
    initialise(model, 0.2, seed=0)
    apply_lora(model, 4, 8.0)
    world = get_world_size()
    parallelise(model, make_meshes(Layout(1, world, world), "cpu"), compute)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora" in name:
                parameter.fill_(7.0)
    reset_lora(model, torch.Generator().manual_seed(5))
    start = {name: whole(parameter) for name, parameter in model.named_parameters() if "lora" in name}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.fill_(0.01)
    ids = torch.arange(14) * 7
    loss = model(ids, torch.tensor([0, 5, 14]), ids.roll(-1)) / world
    loss.backward()
    return start, {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def whole(value: Tensor) -> Tensor:
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()
