"""What the ranks of test_export.py do: a run of one step, as `runtime train` leaves it."""

import json
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from dayzero.runtime import checkpointing
from dayzero.runtime.config import Optimizer
from dayzero.runtime.headers import read_headers
from dayzero.runtime.load import load_checkpoint
from dayzero.runtime.lora import apply_lora, reset_lora
from dayzero.runtime.optimizer import make_optimizer
from dayzero.runtime.package import load_package
from dayzero.runtime.parallel import Layout, make_meshes, parallelise

LORA = {"rank": 4, "alpha": 6.0, "dropout": 0.0}


def train(package_folder: Path, run: Path, lora: bool) -> Tensor:
    """Trains one step on all ranks with ep 2, saves checkpoints 1 and 2, and returns the logits of step 2."""
    package = load_package(package_folder)
    assert package.checkpoint is not None
    world = dist.get_world_size()
    with torch.device("meta"):
        model = package.build()
    if lora:
        apply_lora(model, LORA["rank"], LORA["alpha"])
    model.float()
    parallelise(model, make_meshes(Layout(1, world, 2), "cpu"))
    model.to_empty(device="cpu")
    adapters = [name for name, _ in model.named_parameters() if "lora_" in name]
    load_checkpoint(model, package.rules, package.checkpoint, read_headers(package.checkpoint), elsewhere=adapters)
    reset_lora(model, torch.Generator().manual_seed(0))
    optimizer = make_optimizer(model, Optimizer(lr=0.02))
    ids, cu_seqlens = torch.arange(11) * 13, torch.tensor([0, 11])
    for step in (1, 2):
        model(ids, cu_seqlens, ids.roll(-1)).div(11 * world).backward()
        optimizer.step()
        optimizer.zero_grad()
        checkpointing.save(run, step, model, optimizer, keep=2)
    if dist.get_rank() == 0:
        record = {"package": str(package_folder), "checkpoint": str(package.checkpoint), "config": {"lora": LORA}}
        (run / "run.json").write_text(json.dumps(record))
    with torch.no_grad():
        return model(ids, cu_seqlens)
