"""What the ranks of test_optimizer.py, test_moments.py and test_muon.py do."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dayzero.runtime.config import Optimizer
from dayzero.runtime.load import load_random, local_part
from dayzero.runtime.moments import Moments, Noise, local
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


def cut_rows(shape: tuple[int, ...], dim: int) -> list[tuple[Tensor, Tensor, Tensor]]:
    """(codes, scales, what is read again) of an 8-bit moment of a parameter whose dimension `dim` is cut, whole; of a
    first and of a second moment, a few rows at a time."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    value = torch.randn(shape, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 2, shape[-1])
    found = []
    for root, whole in ((False, value), (True, value.square())):
        parameter = torch.nn.Parameter(distribute_tensor(whole, mesh, [Shard(dim)], src_data_rank=None))
        moments, noise = Moments("8bit"), Noise(parameter, 7)
        state, read = moments.zeros(parameter, "m"), torch.zeros_like(local(parameter))
        for start in range(0, shape[0], 2):
            rows = slice(start, start + 2)
            moments.write(state, "m", local(parameter)[rows], rows, root, noise)
            read[rows] = moments.read(state, "m", read.device, rows, root)
        placed = DTensor.from_local(read, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride())
        found.append(tuple(tensor.full_tensor() for tensor in (state["m"], state["m.scale"], placed)))
    return found
