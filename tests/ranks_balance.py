"""What the ranks of test_balance.py do: a routed mixture with balancing on every rank, beside one process that has all
of the tokens."""

import copy
from pathlib import Path
from typing import Any

import ranks_gradients
import torch
import torch.distributed as dist
from exactness import batches, relative_error, worst
from exactness import whole as whole_tensor

from dayzero.runtime.balance import Balance
from dayzero.runtime.config import Balance as Settings
from dayzero.runtime.nn import Experts, MixtureOfExperts, Router
from dayzero.runtime.nn.context import Context
from dayzero.runtime.recompute import recompute

HIDDEN, EXPERTS = 10, 8
LENGTHS = (((5, 9), (4,)), ((7,), (3, 2, 6)))  # documents of each rank, in two batches
TOTAL = 36


def context_of(lengths: tuple[int, ...]) -> Context:
    ends = torch.tensor([0, *lengths]).cumsum(0)
    position = torch.cat([torch.arange(length) for length in lengths])
    return Context(ends, lengths, position)


def mixture(score: Any = "softmax") -> MixtureOfExperts:
    torch.manual_seed(3)
    moe = MixtureOfExperts(
        Router(HIDDEN, EXPERTS, 2, score=score, selection_bias=True), Experts(EXPERTS, HIDDEN, 6, "silu")
    ).double()
    for tensor in (*moe.parameters(), *moe.buffers()):
        torch.nn.init.normal_(tensor, std=0.5)
    return moe


def tokens(rank: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * rank + batch)
    return torch.randn(sum(LENGTHS[rank][batch]), HIDDEN, generator=generator, dtype=torch.float64)


def compare(settings: dict[str, Any], score: str, recomputed: bool) -> dict[str, Any]:
    """Gradients of this rank's batches, summed over the ranks, beside those of one process whose batches are both
    ranks' side by side; likewise counts, losses and biases."""
    whole, part = mixture(score), mixture(score)
    if recomputed:
        recompute(part)
    one, mine = Balance(whole, Settings(**settings), None), Balance(part, Settings(**settings), dist.group.WORLD)
    one.begin(TOTAL)
    mine.begin(TOTAL)
    rank, errors = dist.get_rank(), {}
    for batch in range(2):
        lengths = tuple(length for of_rank in LENGTHS for length in of_rank[batch])
        x = torch.cat([tokens(other, batch) for other in range(2)]).requires_grad_()
        whole(x, context_of(lengths)).sum().backward()
        one.add()
        own = tokens(rank, batch).requires_grad_()
        part(own, context_of(LENGTHS[rank][batch])).sum().backward()
        mine.add()
        start = 0 if rank == 0 else sum(LENGTHS[0][batch])
        errors[f"batch {batch}"] = relative_error(own.grad, x.grad[start : start + len(own)])
    for (name, parameter), other in zip(part.named_parameters(), whole.parameters(), strict=True):
        dist.all_reduce(parameter.grad)
        errors[name] = relative_error(parameter.grad, other.grad)
    plain = mixture(score)
    x = torch.cat([tokens(other, 0) for other in range(2)])
    before = copy.deepcopy(part.router.selection_bias)
    plain(x, context_of((len(x),)))
    want, got = one.finish(), mine.finish()
    return {
        "gradients": errors[worst(errors)],
        "losses": {name: abs(got.losses[name] - value) / value for name, value in want.losses.items()},
        "counts": (got.counts[""].tolist(), want.counts[""].tolist()),
        "moved": float((part.router.selection_bias - before).norm()),
        "bias": float((part.router.selection_bias - whole.router.selection_bias).norm()),
    }


def of_shared_batches(folder: Path, settings: dict[str, Any], cases: list[tuple]) -> list[dict[str, Any]]:
    """Of a whole model whose ranks share two batches, by layout and recompute, beside one process: gradients, losses
    and counts. share: how much of the routers' gradients is that of the losses."""
    return [_of_shared_batch(folder, settings, *case) for case in cases]


def _of_shared_batch(folder: Path, settings: dict[str, Any], layout: tuple[int, ...], recomputed: bool):
    (plain, vocabulary), (one, _) = ranks_gradients.loaded(folder), ranks_gradients.loaded(folder)
    mine, _ = ranks_gradients.loaded(folder, recomputed=recomputed, layout=layout)
    every = list(batches(vocabulary, 0, 2))
    tokens = sum(len(ids) for ids, _, _ in every)
    loads = []
    for model, balance in (
        (plain, None),
        (one, Balance(one, Settings(**settings), None)),
        (mine, Balance(mine, Settings(**settings), dist.group.WORLD)),
    ):
        if balance is not None:
            balance.begin(tokens)
        for ids, labels, bounds in every:
            (model(ids, bounds, labels) / tokens).backward()
            if balance is not None:
                balance.add()
        if balance is not None:
            loads.append(balance.finish())
    want, got = loads
    errors, share = {}, 0.0
    for (name, parameter), other, without in zip(
        mine.named_parameters(), one.parameters(), plain.parameters(), strict=True
    ):
        assert other.grad is not None
        errors[name] = relative_error(whole_tensor(parameter.grad), other.grad)
        if name.endswith("router.weight"):
            share = max(share, relative_error(without.grad, other.grad))
    where = worst(errors)
    return {
        "gradients": errors[where],
        "where": where,
        "losses": {name: abs(got.losses[name] - value) / value for name, value in want.losses.items()},
        "counts": all(got.counts[name].equal(count) for name, count in want.counts.items()),
        "share": share,
    }
