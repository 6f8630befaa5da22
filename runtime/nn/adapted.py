"""A block whose projections have low-rank additions, a set of them for each layer that shares the block."""

from functools import partial
from typing import Any

from torch import Tensor, nn

from .linear import reset_linear


class Addition(nn.Module):
    """up_i(down(x)) for projections i on the same input.  x: [..., hidden] -> [..., widths[i]].  No biases."""

    def __init__(self, hidden: int, rank: int, widths: dict[str, int]):
        super().__init__()
        self.down = nn.Linear(hidden, rank, bias=False)
        self.up = nn.ModuleDict({name: nn.Linear(rank, width, bias=False) for name, width in widths.items()})

    def reset_parameters(self, std: float) -> None:
        reset_linear(self.down, std)
        for linear in self.up.children():
            assert isinstance(linear, nn.Linear)
            reset_linear(linear, std)


class Adapted(nn.Module):
    """The block, where its projection W x is W x + up(down(x)) (Zamba2: Glorioso et al. 2024, arXiv:2411.15242).

    targets: names of linear children of the block; those in one list read the same down(x). rank: rows of down. uses:
    sets of additions, of which number `context.use` is used. Whatever the block reads and gives, this does.
    """

    uses_context = True

    def __init__(self, block: nn.Module, targets: list[list[str]], rank: int, uses: int = 1):
        super().__init__()
        self.block, self.targets = block, targets
        sizes: list[tuple[int, dict[str, int]]] = []
        for names in targets:
            linears = {name: linear for name in names if isinstance(linear := block.get_submodule(name), nn.Linear)}
            if linears.keys() != set(names):
                raise ValueError(f"{', '.join(names)} are not all projections of {type(block).__name__}")
            hidden = {linear.in_features for linear in linears.values()}
            if len(hidden) != 1:
                raise ValueError(f"{', '.join(names)} read inputs of different widths")
            sizes.append((hidden.pop(), {name: linear.out_features for name, linear in linears.items()}))
        self.uses = nn.ModuleList(
            nn.ModuleList(Addition(hidden, rank, widths) for hidden, widths in sizes) for _ in range(uses)
        )

    @property
    def parallel_rows(self) -> bool:
        """A block without a context looks at each token by itself."""
        return not getattr(self.block, "uses_context", False)

    @property
    def context_parallel(self) -> bool:
        return self.parallel_rows or getattr(self.block, "context_parallel", False)

    def forward(self, *args: Any) -> Any:
        *inputs, context = args
        handles = []
        try:
            for names, addition in zip(self.targets, self.uses[context.use], strict=True):  # type: ignore[call-overload]
                low: list[tuple[Tensor, Tensor]] = []
                for name in names:
                    add = partial(_add, addition, name, low)
                    handles.append(self.block.get_submodule(name).register_forward_hook(add))
            return self.block(*inputs, context) if getattr(self.block, "uses_context", False) else self.block(*inputs)
        finally:
            for handle in handles:
                handle.remove()


def _add(
    addition: Addition, name: str, low: list[tuple[Tensor, Tensor]], linear: Any, args: Any, out: Tensor
) -> Tensor:
    """low: (input, down(input)) of the projection that ran before, if any."""
    if not low or low[0][0] is not args[0]:
        low[:] = [(args[0], addition.down(args[0]))]
    return out + addition.up[name](low[0][1])
