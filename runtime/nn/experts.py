"""One container for the routed experts of a layer, whatever their number and form."""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dayzero.kernels.grouped_gemm import grouped_gemm

from .activation import activation
from .gated_activation import Gate, gated
from .small_batches import merged


class Experts(nn.Module):
    """Feed-forward experts, stacked: down(act(gate x) * (up x)), or down(act(up x)) where not `is_gated`.

    gate_up: [E, 2F, H], gate rows first, or up: [E, F, H]; down: [E, H, F]. bias: of every projection, [E, 2F] (or
    [E, F]) and [E, H].

    act: None where another block computes something between the two projections (`into`, `out_of`) itself.

    forward(x, counts): x [M, H] sorted by expert, counts [E] int64 rows of each -> [M, H], zero behind the last.
    Rows that come in parts are computed within one call, so that the parameters are gathered once and their gradients
    reduced once: forward(parts, None, through) is through(self, parts), which calls `compute`.
    merge_below: the first so many rows of every expert are computed as one padded batch, see `small_batches`.
    Under expert parallelism the parameters are DTensors sharded on E, and counts are those of the local experts.
    """

    joined_matrices: ClassVar = {"gate_up": 2}  # an optimizer of matrices takes gate and up apart

    def __init__(
        self, experts: int, hidden: int, width: int, act: Gate | None, is_gated: bool = True, bias: bool = False
    ):
        super().__init__()
        if act is None and is_gated:
            raise ValueError("a gate needs an activation")
        if not is_gated and not isinstance(act, str | None):
            raise ValueError(f"{type(act).__name__} is the gate of a gated feed-forward layer; these experts have none")
        self.experts, self.hidden, self.width, self.is_gated = experts, hidden, width, is_gated
        self.act: Gate | None = act
        if is_gated:
            self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        else:
            self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        self.in_bias = nn.Parameter(torch.empty(experts, (1 + is_gated) * width)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(experts, hidden)) if bias else None
        self.merge_below = 0

    def reset_parameters(self, std: float) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=std)

    def forward(self, x: Any, counts: Any, through: Callable[["Experts", Any], Any] | None = None) -> Any:
        return self.compute(x, counts) if through is None else through(self, x)

    def compute(self, x: Tensor, counts: Tensor) -> Tensor:
        """x: [M, H] sorted by expert, counts: [E] -> [M, H]. Not the module's call, which gathers the parameters."""
        if self.merge_below:
            return merged(x, counts, self.merge_below, self._in_groups, self._in_a_batch)
        return self._in_groups(x, counts)

    def into(self, x: Tensor, counts: Tensor) -> Tensor:
        """The first projection alone: x [M, H] sorted by expert, counts: [E] -> [M, F], or [M, 2F] where gated."""
        return _product(x, self.gate_up if self.is_gated else self.up, self.in_bias, counts)

    def out_of(self, inner: Tensor, counts: Tensor) -> Tensor:
        """The last projection alone: inner [M, F] sorted by expert, counts: [E] -> [M, H]."""
        return _product(inner, self.down, self.down_bias, counts)

    def _in_groups(self, x: Tensor, counts: Tensor) -> Tensor:
        return self._feed_forward(x, lambda x, weight, bias: _product(x, weight, bias, counts))

    def _in_a_batch(self, x: Tensor) -> Tensor:
        """[E, P, H] -> [E, P, H]: each expert's own P rows."""
        return self._feed_forward(x, _batched_product)

    def _feed_forward(self, x: Tensor, product: Callable[[Tensor, Tensor, Tensor | None], Tensor]) -> Tensor:
        inner = product(x, self.gate_up if self.is_gated else self.up, self.in_bias)
        if self.act is None:
            raise ValueError("these experts have nothing between their projections; another block uses them")
        if self.is_gated:
            gate, up = inner.chunk(2, -1)
            inner = gated(self.act, gate, up)
        else:
            inner = activation(self.act)(inner)  # type: ignore[arg-type]
        return product(inner, self.down, self.down_bias)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """W_e x + b_e of every row; zero for rows behind the last expert's."""
    y = grouped_gemm(x, _local(weight), counts)
    if bias is None:
        return y
    rows = _local(bias).to(y.dtype).repeat_interleave(counts, 0)
    return y + F.pad(rows, (0, 0, 0, y.shape[0] - rows.shape[0]))


def _batched_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """W_e x + b_e of x [E, P, .]."""
    y = torch.bmm(x, _local(weight).transpose(1, 2))
    return y if bias is None else y + _local(bias).to(y.dtype).unsqueeze(1)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
