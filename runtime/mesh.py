"""How the ranks are arranged: one set of ranks, and the meshes that parameters live on."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from dayzero.runtime.errors import InputError
from dayzero.runtime.split import Split


@dataclass(frozen=True)
class Layout:
    """How the ranks are arranged. Raises InputError if the sizes do not fit together.

    dp_replicate * dp_shard * cp * tp ranks in all, those of tp being neighbours. cp * tp ranks work on one batch: cp
    parts of its tokens, each over tp. ep neighbours share the experts of a layer, whatever else they share.
    """

    dp_replicate: int
    dp_shard: int
    ep: int
    tp: int = 1
    cp: int = 1

    def __post_init__(self):
        for name in ("dp_replicate", "dp_shard", "ep", "tp", "cp"):
            if getattr(self, name) < 1:
                raise InputError(f"parallel.{name}", found=str(getattr(self, name)), expected="1 or more")
        if self.world % self.ep:
            raise InputError(
                "parallel.ep",
                found=str(self.ep),
                expected=f"a divisor of the {self.world} ranks",
                hint=f"Choose one of {divisors(self.world)}, or start another number of processes.",
            )

    @property
    def world(self) -> int:
        return self.dp_replicate * self.dp_shard * self.cp * self.tp

    @property
    def efsdp(self) -> int:
        return self.world // self.ep

    @property
    def batches(self) -> int:
        """Batches that all ranks together work on at a time."""
        return self.dp_replicate * self.dp_shard

    @property
    def together(self) -> int:
        """Ranks that work on one batch."""
        return self.cp * self.tp

    def check_experts(self, counts: Sequence[int]) -> None:
        """Raises InputError unless the experts of every layer divide over ep. counts: experts of each MoE layer."""
        if self.ep > 1 and not counts:
            raise InputError("parallel.ep", found=str(self.ep), expected="1: this model has no routed experts")
        for count in counts:
            if count % self.ep:
                both = [size for size in divisors(self.world) if not any(count % size for count in counts)]
                raise InputError(
                    "parallel.ep",
                    found=str(self.ep),
                    expected=f"a divisor of the layer's {count} experts",
                    hint=f"On {self.world} ranks choose one of {both}.",
                )


def divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


@dataclass(frozen=True)
class Meshes:
    """dense: of what tp does not cut, dimensions (dp_replicate, dp_shard), or (dp_shard,) where nothing is replicated;
    its dp_shard counts the ranks of cp and tp too. cut: of what tp cuts, the same with a last dimension tp, None for
    tp 1. experts: (efsdp, ep). split: how ranks share a batch, None where each has its own.
    """

    dense: DeviceMesh
    experts: DeviceMesh
    cut: DeviceMesh | None = None
    split: Split | None = field(default=None, compare=False)


def make_meshes(layout: Layout, device: str) -> Meshes:
    """All views of the process group, which must be initialised and of the layout's size. device: "cpu", ..."""
    replicas = ((layout.dp_replicate, "dp_replicate"),) if layout.dp_replicate > 1 else ()

    def mesh(*dimensions: tuple[int, str]) -> DeviceMesh:
        sizes, names = zip(*dimensions, strict=True)
        return init_device_mesh(device, sizes, mesh_dim_names=names)

    dense = mesh(*replicas, (layout.dp_shard * layout.together, "dp_shard"))
    experts = mesh((layout.efsdp, "efsdp"), (layout.ep, "ep"))
    if layout.together == 1:
        return Meshes(dense, experts)
    cut, tp, cp, both = None, None, None, None
    if layout.tp > 1:
        cut = mesh(*replicas, (layout.dp_shard * layout.cp, "dp_shard"), (layout.tp, "tp"))
        tp = cut.get_group("tp")
    if layout.cp > 1:
        cp = mesh((layout.batches, "batch"), (layout.cp, "cp"), (layout.tp, "tp")).get_group("cp")
    if layout.tp > 1 and layout.cp > 1:
        both = mesh((layout.batches, "batch"), (layout.together, "together")).get_group("together")
    return Meshes(dense, experts, cut, Split(tp, cp, both))


def batch_of_rank(layout: Layout) -> int:
    """Which of the batches of a step this rank works on."""
    return dist.get_rank() // layout.together
