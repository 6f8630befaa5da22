"""What the ranks of test_optimizer.py, test_moments.py and test_muon.py do."""

from pathlib import Path

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from dayzero.runtime.config import Optimizer
from dayzero.runtime.load import load_random, local_part
from dayzero.runtime.optimizer import make_optimizer
from dayzero.runtime.package import load_package
from dayzero.runtime.parallel import Layout, make_meshes, parallelise


def steps(package: Path, layout: tuple[int, int, int], settings: Optimizer, dtype: torch.dtype) -> dict[str, Tensor]:
    """Every parameter and every stored moment, whole, after three steps with gradients that depend on nothing."""
    made = load_package(package)
    with torch.device("meta"):
        model, fresh = made.build().to(dtype), made.build()
    parallelise(model, make_meshes(Layout(*layout), "cpu"))
    model.to_empty(device="cpu")
    load_random(model, fresh, 0.1, seed=3)
    optimizer = make_optimizer(model, settings)
    for step in range(3):
        for i, parameter in enumerate(model.parameters()):
            draw = torch.Generator().manual_seed(1000 * step + i)
            gradient = torch.randn(parameter.shape, generator=draw, dtype=torch.float64).to(dtype)
            parameter.grad = torch.zeros_like(parameter)
            mine, region = local_part(parameter.grad)
            mine.copy_(gradient[region])
        optimizer.step()
    tensors = {}
    for name, parameter in model.named_parameters():
        for key, value in {"": parameter.detach(), **optimizer.state[parameter]}.items():
            tensors[f"{name} {key}"] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return tensors


def steps_of(package: Path, cases: list[tuple]) -> list[dict[str, Tensor]]:
    return [steps(package, *case) for case in cases]
