"""What the ranks of test_gradients.py do: a clipped optimizer step of a sharded model beside one of a whole model."""

from pathlib import Path

import torch
import torch.distributed as dist
from exactness import batches, relative_error, whole, worst

from dayzero.runtime.config import Optimizer
from dayzero.runtime.headers import read_headers
from dayzero.runtime.load import load_checkpoint
from dayzero.runtime.lora import apply_lora, reset_lora
from dayzero.runtime.mesh import batch_of_rank
from dayzero.runtime.optimizer import clip_gradients, gradient_norm, make_optimizer
from dayzero.runtime.package import load_package
from dayzero.runtime.parallel import Layout, make_meshes, parallelise
from dayzero.runtime.recompute import recompute

CLIP = 0.01  # below every norm here


def worst_errors(folder: Path, cases: list[tuple]) -> list[dict[str, float]]:
    return [_errors(folder, *case) for case in cases]


def loaded(folder: Path, lora: bool = False, recomputed: bool = False, layout: tuple[int, ...] | None = None):
    """(model in float64, sharded where there is a layout, size of its vocabulary)."""
    package = load_package(folder)
    with torch.device("meta"):
        model = package.build()
        if lora:
            apply_lora(model, rank=4, alpha=8)
    model.to(torch.float64)
    if recomputed:
        for layer in model.layers:
            recompute(layer)
    if layout is not None:
        parallelise(model, make_meshes(Layout(*layout), "cpu"))
    model.to_empty(device="cpu")
    adapters = [name for name, _ in model.named_parameters() if "lora_" in name]
    load_checkpoint(model, package.rules, package.checkpoint, read_headers(package.checkpoint), elsewhere=adapters)
    reset_lora(model, torch.Generator().manual_seed(3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_b"):
                parameter.fill_(0.01)
    return model, package.spec.vocabulary


def _errors(folder: Path, layout, name: str, lora: bool, recomputed: bool, accumulation: int) -> dict[str, float]:
    """Worst relative errors of gradients before and after clipping, the norm, and what one step moved."""
    settings = Optimizer(name=name, lr=0.01, weight_decay=0.1)
    (reference, vocabulary), (model, _) = loaded(folder, lora), loaded(folder, lora, recomputed, layout)
    every = [list(batches(vocabulary, rank, accumulation)) for rank in range(Layout(*layout).batches)]
    valid = sum(int((labels != -100).sum()) for part in every for _, labels, _ in part)
    for one, mine in ((reference, [b for part in every for b in part]), (model, every[batch_of_rank(Layout(*layout))])):
        for ids, labels, cu_seqlens in mine:
            (one(ids, cu_seqlens, labels) / valid).backward()
    trained = [(n, p, q) for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True)]
    trained = [(n, p, q) for n, p, q in trained if q.requires_grad]
    before = {n: q.detach().clone() for n, _, q in trained}
    errors = {"gradients": _worst({n: relative_error(whole(p.grad), q.grad) for n, p, q in trained})}
    norm = gradient_norm(model.parameters())
    want = torch.cat([q.grad.flatten() for _, _, q in trained]).norm()
    errors["norm"] = float(abs(norm - want) / want)
    assert want > CLIP
    for _, _, q in trained:
        q.grad *= CLIP / want
    clip_gradients(model.parameters(), CLIP, norm)
    errors["clipped"] = _worst({n: relative_error(whole(p.grad), q.grad) for n, p, q in trained})
    for one in (model, reference):
        make_optimizer(one, settings).step()
    errors["step"] = _worst(
        {n: relative_error(whole(p.detach()) - before[n], q.detach() - before[n]) for n, p, q in trained}
    )
    return errors


def _worst(errors: dict[str, float]) -> float:
    return errors[worst(errors)]


def reduced(folder: Path) -> dict[str, float]:
    """Of a model that computes in bfloat16 on ranks with a batch each: whether its gradients are float32, and the worst
    error against the ranks' own gradients in bfloat16, summed in float32 ("wide"). narrow: that of a sum in bfloat16.
    """
    package = load_package(folder)
    models = []
    for layout in (None, (1, dist.get_world_size(), 1)):
        with torch.device("meta"):
            model = package.build()
        if layout is not None:
            parallelise(model, make_meshes(Layout(*layout), "cpu"), torch.bfloat16)
        model.to_empty(device="cpu")
        load_checkpoint(model, package.rules, package.checkpoint, read_headers(package.checkpoint))
        models.append(model)
    alone, model = models[0].bfloat16(), models[1]
    for ids, labels, cu_seqlens in batches(package.spec.vocabulary, dist.get_rank(), 1):
        for one in (alone, model):
            (one(ids, cu_seqlens, labels) / 7).backward()
    wide, narrow, dtypes = {}, {}, set()
    for (name, parameter), other in zip(model.named_parameters(), alone.parameters(), strict=True):
        parts = [torch.empty_like(other.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, other.grad)
        got, want = whole(parameter.grad), sum(part.float() for part in parts)
        dtypes.add(parameter.grad.dtype)
        wide[name], narrow[name] = relative_error(got, want), relative_error(sum(parts).float(), want)
    return {"wide": _worst(wide), "narrow": _worst(narrow), "float32": float(dtypes == {torch.float32})}
