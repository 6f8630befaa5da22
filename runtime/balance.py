"""Keeping experts evenly busy: what each one gets, counted over all ranks, and what is done about it.

A selection bias that no optimizer sees is moved after every step: by a fixed amount towards the mean (sign), by how far
the load is from it (proportional; both Wang et al. 2024, arXiv:2408.15664), or to where the expert would have had its
share of the step's tokens (quantile). Losses are in `nn.router_losses`, second copies in `nn.duplicates`.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from dayzero.runtime import config
from dayzero.runtime.errors import InputError
from dayzero.runtime.nn import Routed, Router, fused_dispatch
from dayzero.runtime.nn.capacity import Capacity
from dayzero.runtime.nn.duplicates import Duplicates
from dayzero.runtime.nn.exchange import Waiting
from dayzero.runtime.nn.router_losses import RouterLosses, margin_quantile
from dayzero.runtime.processes import device_type

BiasUpdate = Literal["off", "sign", "proportional", "quantile"]


@dataclass(frozen=True)
class Load:
    """Of one step over all ranks. busiest: by layer, copies of the busiest expert over the mean. losses: of routers, by
    name. counts: by layer, copies of each expert."""

    busiest: dict[str, float]
    losses: dict[str, float]
    counts: dict[str, Tensor]

    @property
    def worst(self) -> float | None:
        return max(self.busiest.values(), default=None)


class Balance:
    """Counts, step by step, and corrects. group: the ranks that hold different batches; None for a single process.
    waiting: the clock of all exchanges of tokens.

        balance.begin(tokens)              # of the whole step
        for every batch: forward, backward; balance.add()
        load = balance.finish()

    Copies count once, also where a pass is computed again; a layer that runs several times has those of every time.
    Raises InputError for settings that this model has nothing to apply to.
    """

    def __init__(self, model: nn.Module, settings: config.Balance, group: ProcessGroup | None):
        self.settings, self.group, self.waiting = settings, group, Waiting()
        self.mixtures = {name: m for name, m in model.named_modules() if isinstance(m, Routed)}
        self.routers = [m for m in model.modules() if isinstance(m, Router)]
        self.biased = {name: m for name, m in self.mixtures.items() if _bias(m) is not None}
        wants_losses = any((settings.auxiliary_loss, settings.sequence_loss, settings.z_loss))
        if settings.bias != "off" and not self.biased:
            raise InputError(
                "balance.bias", found=settings.bias, expected="off: no router of this model has a selection bias"
            )
        if wants_losses and not self.routers:
            raise InputError(
                "balance", found="a loss of routers", expected="none: this model has no router of one matrix"
            )
        for mixture in self.biased.values():
            if settings.bias != "off":
                _bias(mixture).moves = True  # type: ignore[union-attr]  so that checkpoints keep it
        quantile = settings.bias == "quantile"
        odd = [name for name, m in self.biased.items() if not isinstance(m.router, Router)]
        if quantile and odd:
            raise InputError("balance.bias", found="quantile", expected=f"sign or proportional, for {odd[0]}.router")
        if settings.duplicates and not any(_ranks(m) > 1 for m in self.mixtures.values()):
            raise InputError("balance.duplicates", found=str(settings.duplicates), expected="0 where parallel.ep is 1")
        for router in self.routers:
            if wants_losses or quantile:
                router.losses = RouterLosses(
                    settings.auxiliary_loss,
                    settings.sequence_loss,
                    settings.z_loss,
                    quantile,
                    group,
                    getattr(model, "split", None),
                )
        for mixture in self.mixtures.values():
            if mixture.exchange is not None:
                mixture.exchange.waiting = self.waiting
        self.begin(1)

    @property
    def exchanges(self) -> bool:
        """Whether some layer's tokens travel."""
        return any(mixture.exchange is not None for mixture in self.mixtures.values())

    def begin(self, tokens: int) -> None:
        """tokens: of the whole step, over all ranks and batches."""
        self.counts: dict[str, Tensor] = {}
        self.margins: dict[str, Tensor] = {}
        self.losses: dict[str, Tensor] = {}
        for mixture in self.mixtures.values():
            mixture.take_counts()
        for router in self.routers:
            if router.losses is not None:
                router.losses.take()
                router.losses.tokens = max(1, tokens)

    def add(self) -> None:
        """Takes in what was counted since the last time."""
        for name, mixture in self.mixtures.items():
            counts = mixture.take_counts()
            if counts is not None:
                _add(self.counts, name, counts)
        names = {id(mixture.router): name for name, mixture in self.mixtures.items()}
        for router in self.routers:
            if router.losses is not None:
                values, margins = router.losses.take()
                for name, value in values.items():
                    _add(self.losses, name, value.double())
                if margins is not None and id(router) in names:
                    _add(self.margins, names[id(router)], margins)

    def finish(self, correct: bool = True) -> Load:
        """Sums over the ranks. correct: move selection biases, and choose which experts have two copies from now on."""
        counts, margins, losses = (self._summed(part) for part in (self.counts, self.margins, self.losses))
        if correct:
            self._correct(counts, margins)
        busiest = {name: float(count.max() / count.double().mean()) for name, count in counts.items() if count.any()}
        return Load(busiest, {name: float(value) for name, value in losses.items()}, counts)

    def _correct(self, counts: dict[str, Tensor], margins: dict[str, Tensor]) -> None:
        for name in self.biased.keys() & counts.keys():
            mixture = self.biased[name]
            bias = _bias(mixture)
            assert bias is not None
            if self.settings.bias == "quantile":
                share = mixture.router.top_k / mixture.router.experts
                bias.add_(self.settings.bias_rate * margin_quantile(margins[name], share).to(bias.dtype))
            elif self.settings.bias != "off":
                # Classes beyond the experts keep their bias.
                step = bias_step(counts[name], self.settings.bias) * self.settings.bias_rate
                bias[: step.numel()].add_(step.to(bias.dtype))
        if self.settings.duplicates:
            for name, mixture in self.mixtures.items():
                if mixture.exchange is not None and name in counts:
                    ranks = _ranks(mixture)
                    hosts = choose_hosts(counts[name].tolist(), ranks, self.settings.duplicates)
                    mixture.exchange.duplicates = Duplicates(hosts, counts[name].numel(), ranks)

    def _summed(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        if not values:
            return {}
        flat = torch.cat([value.flatten() for value in values.values()])
        if self.group is not None:
            dist.all_reduce(flat, group=self.group)
        parts = flat.split([value.numel() for value in values.values()])
        return {n: part.view_as(value) for (n, value), part in zip(values.items(), parts, strict=True)}


def bias_step(counts: Tensor, how: BiasUpdate) -> Tensor:
    """[E] float64, to be multiplied by the rate: up for experts with less than the mean, down for those with more."""
    short = counts.double().mean() - counts
    return short.sign() if how == "sign" else short / counts.double().mean().clamp(min=1)


def choose_hosts(counts: list[int], ranks: int, duplicates: int) -> list[tuple[int, int]]:
    """(expert, rank that gets a second copy of it): in turn the busiest expert left, on the rank with least to do."""
    own = len(counts) // ranks
    work = [float(sum(counts[rank * own : (rank + 1) * own])) for rank in range(ranks)]
    hosts = []
    for expert in sorted(range(len(counts)), key=lambda e: (-counts[e], e))[:duplicates]:
        host = min((rank for rank in range(ranks) if rank != expert // own), key=lambda rank: (work[rank], rank))
        work[host] += counts[expert] / 2
        work[expert // own] -= counts[expert] / 2
        hosts.append((expert, host))
    return hosts


def arrange_experts(model: nn.Module, settings: config.Experts) -> None:
    """Applies the settings to every mixture of a model that is sharded. Raises InputError for a dispatcher that this
    machine or this model cannot use."""
    alone = None
    if settings.dispatcher == "fused":
        alone = _group_of_operators([module for module in model.modules() if isinstance(module, Routed)])
    for module in model.modules():
        if isinstance(module, Routed):
            module.experts.merge_below = settings.merge_below
            if settings.capacity is not None:
                module.capacity = Capacity(settings.capacity, settings.pad)
            if module.exchange is not None:
                module.exchange.dispatcher, module.exchange.parts = settings.dispatcher, settings.parts
                module.exchange.alone = alone


def _group_of_operators(mixtures: list[Routed]) -> ProcessGroup | None:
    """A group for the fused dispatcher alone, or None where nothing travels."""

    def refusal(found: str) -> InputError:
        return InputError("experts.dispatcher", found=f"fused, and {found}", expected="alltoall or allgather")

    ranks = max((_ranks(mixture) for mixture in mixtures), default=1)
    if ranks == 1:
        return None
    device = device_type()
    if device != "npu":
        raise refusal(f"the operators run on npu, not on {device}")
    for mixture in mixtures:
        if mixture.router.experts != mixture.experts.experts:
            raise refusal("a router with classes beyond the experts, to which nothing can be sent")
    return fused_dispatch.own_group(ranks)


def _bias(mixture: Routed) -> Tensor | None:
    return getattr(mixture.router, "selection_bias", None)


def _ranks(mixture: Routed) -> int:
    return 1 if mixture.exchange is None else mixture.exchange.group.size()


def _add(totals: dict[str, Tensor], name: str, value: Tensor) -> None:
    totals[name] = totals[name] + value if name in totals else value.clone()
