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
from .permutation import Compute


class Experts(nn.Module):
    """Feed-forward experts, stacked: down(act(gate x) * (up x)), or down(act(up x)) where not `is_gated`.

    gate_up: [E, 2F, H], gate rows first, or up: [E, F, H]; down: [E, H, F]. bias: of every projection, [E, 2F] (or
    [E, F]) and [E, H].

    forward(x, counts): x [M, H] sorted by expert, counts [E] int64 rows of each -> [M, H], zero behind the last.
    Rows that come in parts are computed within one call, so that the parameters are gathered once and their gradients
    reduced once: forward(parts, None, through) is through(experts, parts), where experts(x, counts) is the above.
    Under expert parallelism the parameters are DTensors sharded on E, and counts are those of the local experts.
    """

    joined_matrices: ClassVar = {"gate_up": 2}  # an optimizer of matrices takes gate and up apart

    def __init__(self, experts: int, hidden: int, width: int, act: Gate, is_gated: bool = True, bias: bool = False):
        super().__init__()
        if not is_gated and not isinstance(act, str):
            raise ValueError(f"{type(act).__name__} is the gate of a gated feed-forward layer; these experts have none")
        self.experts, self.hidden, self.width, self.is_gated = experts, hidden, width, is_gated
        self.act: Gate = act
        if is_gated:
            self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        else:
            self.up = nn.Parameter(torch.empty(experts, width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))
        self.in_bias = nn.Parameter(torch.empty(experts, (1 + is_gated) * width)) if bias else None
        self.down_bias = nn.Parameter(torch.empty(experts, hidden)) if bias else None

    def reset_parameters(self, std: float) -> None:
        for name, parameter in self.named_parameters(recurse=False):
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            else:
                nn.init.normal_(parameter, std=std)

    def forward(self, x: Any, counts: Any, through: Callable[[Compute, Any], Any] | None = None) -> Any:
        return self._computed(x, counts) if through is None else through(self._computed, x)

    def _computed(self, x: Tensor, counts: Tensor) -> Tensor:
        inner = _product(x, self.gate_up if self.is_gated else self.up, self.in_bias, counts)
        if self.is_gated:
            gate, up = inner.chunk(2, -1)
            inner = gated(self.act, gate, up)
        else:
            inner = activation(self.act)(inner)  # type: ignore[arg-type]
        return _product(inner, self.down, self.down_bias, counts)


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, counts: Tensor) -> Tensor:
    """W_e x + b_e of every row; zero for rows behind the last expert's."""
    y = grouped_gemm(x, _local(weight), counts)
    if bias is None:
        return y
    rows = _local(bias).to(y.dtype).repeat_interleave(counts, 0)
    return y + F.pad(rows, (0, 0, 0, y.shape[0] - rows.shape[0]))


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
