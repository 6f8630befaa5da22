"""A sharded model against the same model in one process: loss, every gradient, the global norm."""

import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from dayzero.runtime import config
from dayzero.runtime.balance import Balance
from dayzero.runtime.headers import read_headers
from dayzero.runtime.load import load_checkpoint
from dayzero.runtime.lora import LoRALinear, apply_lora, reset_lora
from dayzero.runtime.mesh import batch_of_rank
from dayzero.runtime.nn import MixtureOfExperts
from dayzero.runtime.optimizer import gradient_norm
from dayzero.runtime.package import load_package
from dayzero.runtime.parallel import Layout, make_meshes, parallelise
from dayzero.runtime.recompute import recompute

LENGTHS = [(5, 9), (12,), (3, 1, 2), (7, 7)]  # documents of each batch; one valid token more in each


def batches(vocabulary: int, rank: int, accumulation: int):
    """(ids, labels, cu_seqlens) of each of a rank's batches in a step."""
    for micro in range(accumulation):
        lengths = LENGTHS[(rank + micro) % len(LENGTHS)]
        generator = torch.Generator().manual_seed(97 * rank + micro)
        ids = torch.randint(0, vocabulary, (sum(lengths),), generator=generator)
        labels = torch.randint(0, vocabulary, (sum(lengths),), generator=generator)
        labels[: len(labels) - 1 - rank - 2 * micro] = -100
        yield ids, labels, torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])


def padded(ids, labels, bounds):
    """The same batch as rows of one length: each document is followed by untrained tokens, a document of their own."""
    documents = list(zip(ids.split(bounds.diff().tolist()), labels.split(bounds.diff().tolist()), strict=True))
    longest = max(len(document) for document, _ in documents) + 1
    rows, targets, ends = [], [], [0]
    for document, wanted in documents:
        missing = longest - len(document)
        rows += [document, document.new_zeros(missing)]
        targets += [wanted, wanted.new_full((missing,), -100)]
        ends += [ends[-1] + len(document), ends[-1] + longest]
    return torch.cat(rows), torch.cat(targets), torch.tensor(ends)


def push_routing(model, pushes: dict[int, float]) -> None:
    """Makes every token favour or avoid an expert, in a model without router bias: channel 0 is about 1 throughout."""
    with torch.no_grad():
        model.embed.weight[:, 0] = 40.0
        for layer in model.layers:
            layer.mixer.output.weight[0] = 0.0
            layer.ffn_norm.weight[0] = 1.0
            if isinstance(layer.ffn, MixtureOfExperts):
                layer.ffn.experts.down[:, 0] = 0.0
                for expert, push in pushes.items():
                    layer.ffn.router.weight[expert, 0] = push
            else:
                layer.ffn.down.weight[0] = 0.0


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def relative_error(got, want) -> float:
    """By norms; the absolute error where `want` is nothing but zeros."""
    difference, size = float((got.detach() - want.detach()).norm()), float(want.detach().norm())
    return difference / size if size else difference


def worst(errors: dict[str, float]) -> str:
    """The name of the largest; what is not a number is larger than all (`max` alone passes it over)."""
    return max(errors, key=lambda name: (math.isnan(errors[name]), errors[name]))


def compare(
    folder: Path, layout: tuple[int, ...], *, dtype=torch.float64, recomputed=False, accumulation=1, lora=False,
    chunk: int | None = None,
    pushes: dict[int, float] | None = None,
    pad=False,
) -> dict:  # fmt: skip
    """Of a package's model on this layout."""
    package = load_package(folder)
    headers = read_headers(package.checkpoint)

    def build(device, with_recompute=False):
        with torch.device(device):
            model = package.build()
        if lora:
            apply_lora(model, rank=4, alpha=8)
        if with_recompute:
            for layer in model.all_layers:
                recompute(layer)
        return model.to(dtype)

    def fill(model):
        adapters = [name for name, _ in model.named_parameters() if "lora_" in name]
        read = load_checkpoint(model, package.rules, package.checkpoint, headers, elsewhere=adapters)
        if lora:
            reset_lora(model, torch.Generator().manual_seed(3))
            for module in model.modules():
                if isinstance(module, LoRALinear):
                    module.lora_b.data.fill_(0.01)
        return read

    reference = build("cpu")
    read = fill(reference)
    if pushes:
        push_routing(reference, pushes)
        model = build("cpu", recomputed)
        model.load_state_dict(reference.state_dict())
        parallelise(model, make_meshes(Layout(*layout), "cpu"))
    else:
        model = build("meta", recomputed)
        parallelise(model, make_meshes(Layout(*layout), "cpu"))
        model.to_empty(device="cpu")
        read = fill(model)
    errors = errors_of(reference, model, Layout(*layout), package.spec.vocabulary, accumulation, chunk, pad)
    errors["read"] = read
    errors["placements"] = {name: str(p.placements) for name, p in model.named_parameters() if "experts" in name}
    return errors


def errors_of(
    reference, model, layout: Layout, vocabulary: int, accumulation=1, chunk: int | None = None, pad=False, **balancing
):
    """Of one step of the sharded model: the loss, the worst gradient and which it is, the norm, the routers' losses.
    counts: of the whole step, by layer, and whether the sharded model's are the same."""
    every = [list(batches(vocabulary, number, accumulation)) for number in range(layout.batches)]
    valid = sum(int((labels != -100).sum()) for part in every for _, labels, _ in part)

    loads = []
    totals = []
    for one, mine, group in (
        (reference, [batch for part in every for batch in part], None),
        (model, every[batch_of_rank(layout)], dist.group.WORLD),
    ):
        balance = Balance(one, config.Balance(**balancing), group)
        balance.begin(sum(len(ids) for part in every for ids, _, _ in part))
        total = torch.zeros((), dtype=reference.embed.weight.dtype)
        for batch in mine:
            ids, labels, cu_seqlens = padded(*batch) if pad and one is model else batch
            loss = one(ids, cu_seqlens, labels, chunk if one is model else None) / valid
            loss.backward()
            balance.add()
            total += loss.detach()
        totals.append(total)
        loads.append(balance.finish())
    want, got = totals
    dist.all_reduce(got)

    errors = {
        "loss": float(abs(got - want) / want),
        "parameters": 0.0,
        "gradients": 0.0,
        "where": "",
        "router losses": {
            name: relative_error(torch.tensor(loads[1].losses[name]), torch.tensor(value))
            for name, value in loads[0].losses.items()
        },
        "counts": [count.tolist() for count in loads[0].counts.values()],
        "counted alike": all(loads[1].counts[name].equal(count) for name, count in loads[0].counts.items()),
    }
    expected = dict(reference.named_parameters())
    assert expected.keys() == dict(model.named_parameters()).keys()
    for name, parameter in model.named_parameters():
        other = expected[name]
        assert torch.equal(whole(parameter.detach()), other.detach()), f"{name} was not loaded"
        assert (parameter.grad is None) == (other.grad is None), f"{name} has a gradient on one side only"
        if other.grad is not None:
            error = relative_error(whole(parameter.grad), other.grad)
            if not error <= errors["gradients"]:
                errors["gradients"], errors["where"] = error, name
    norm = torch.stack([p.grad.norm() for p in expected.values() if p.grad is not None]).norm()
    errors["norm"] = float(abs(gradient_norm(model.parameters()) - norm) / norm)
    return errors
