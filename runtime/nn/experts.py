"""One container for the routed experts of a layer, whatever their number."""

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from dayzero.kernels.grouped_gemm import grouped_gemm

from .activation import Activation, gated


class Experts(nn.Module):
    """Gated feed-forward experts, stacked.  gate_up: [E, 2F, H], gate rows first; down: [E, H, F].

    forward(x, counts): x [M, H] sorted by expert, counts [E] int64 rows of each -> [M, H].
    Under expert parallelism the parameters are DTensors sharded on E, and counts are those of the local experts.
    """

    def __init__(self, experts: int, hidden: int, width: int, act: Activation):
        super().__init__()
        self.experts, self.width = experts, width
        self.act: Activation = act
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * width, hidden))
        self.down = nn.Parameter(torch.empty(experts, hidden, width))

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.gate_up, std=std)
        nn.init.normal_(self.down, std=std)

    def forward(self, x: Tensor, counts: Tensor) -> Tensor:
        gate, up = grouped_gemm(x, _local(self.gate_up), counts).chunk(2, -1)
        return grouped_gemm(gated(self.act, gate, up), _local(self.down), counts)


def _local(parameter: Tensor) -> Tensor:
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter
