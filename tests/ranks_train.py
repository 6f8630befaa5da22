"""Training and checkpoints on the ranks of tests/harness.py."""

import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.tensor import DTensor

from dayzero.runtime import checkpointing
from dayzero.runtime.config import Optimizer
from dayzero.runtime.job import Job
from dayzero.runtime.load import load_random
from dayzero.runtime.optimizer import make_optimizer
from dayzero.runtime.package import load_package
from dayzero.runtime.parallel import Layout, make_meshes, parallelise
from dayzero.runtime.train import train as run_training


def train(job: Job) -> None:
    run_training(job, torch.device("cpu"))


def sharded(package: Path, layout: tuple[int, int, int], seed: int):
    """A random model and an optimizer that has taken one step."""
    made = load_package(package)
    with torch.device("meta"):
        model, fresh = made.build(), made.build()
    parallelise(model, make_meshes(Layout(*layout), "cpu"))
    model.to_empty(device="cpu")
    load_random(model, fresh, 0.1, seed)
    optimizer = make_optimizer(model, Optimizer(lr=1e-2))
    ids = torch.arange(24) * 7 % 300
    model(ids, torch.tensor([0, 10, 24]), ids.roll(-1)).backward()
    optimizer.step()
    return model, optimizer


def state(model, optimizer) -> dict[str, torch.Tensor]:
    """Every parameter and every moment, whole."""
    tensors = {}
    for name, parameter in model.named_parameters():
        values = {"": parameter.detach(), **optimizer.state[parameter]}
        for key, value in values.items():
            tensors[f"{name} {key}"] = value.full_tensor() if isinstance(value, DTensor) else value.clone()
    return tensors


def random_weights(package: Path, layout: tuple[int, int, int]) -> dict[str, torch.Tensor]:
    made = load_package(package)
    with torch.device("meta"):
        model, fresh = made.build(), made.build()
    parallelise(model, make_meshes(Layout(*layout), "cpu"))
    model.to_empty(device="cpu")
    load_random(model, fresh, 0.1, seed=5)
    return {name: parameter.full_tensor().detach() for name, parameter in model.named_parameters()}


def save(package: Path, layout: tuple[int, int, int], run: Path, seed: int, steps: list[int], keep: int):
    model, optimizer = sharded(package, layout, seed)
    for step in steps:
        checkpointing.save(run, step, model, optimizer, keep)
    return state(model, optimizer)


def restore(package: Path, layout: tuple[int, int, int], run: Path):
    """(step, state, notes) after restoring over other weights."""
    model, optimizer = sharded(package, layout, seed=99)
    notes = []
    step = checkpointing.restore(run, model, optimizer, notes.append)
    return step, state(model, optimizer), notes


def die_while_saving(package: Path, layout: tuple[int, int, int], run: Path, step: int) -> None:
    """Rank 1 dies with its data written and the checkpoint not yet complete."""
    model, optimizer = sharded(package, layout, seed=1)
    write = state_dict_saver.save

    def write_and_die(*args, **kwargs):
        write(*args, **kwargs)
        if dist.get_rank() == 1:
            os._exit(9)

    state_dict_saver.save = write_and_die
    checkpointing.save(run, step, model, optimizer, keep=5)
