"""Tokens to their experts and back by torch_npu's operators, which sort, send and sum in one kernel.

`npu_moe_distribute_dispatch_v2` sends a token once for each of its experts and leaves the rows sorted by expert;
`npu_moe_distribute_combine_v2` takes the rows back and sums those of a token. Neither has a gradient in torch_npu 2.13,
but each is the other's: what a token's copies make of a gradient is summed by combining, and the gradient of a sum goes
to the copies by dispatching it. Weights travel within the rows (`dispatch.pack`), so they get their gradient too.

None of this has run on an NPU: tests hold the calls to the declared schemas and compute them with stand-ins on a CPU.
What is taken from the documentation, which offers the operators for inference:
- Dispatching for the same experts twice gives the same order of rows. It does not say so; the backward pass needs it.
- Atlas A3. A2 wants the weights of choices beside the rows, which are not passed.
- At most 512 tokens a call, and the same `global_bs` in all calls: tokens go in parts of 512, the last one padded.
- A communicator that carries nothing else, and HCCL_BUFFSIZE large enough for 512 tokens of every rank.
- Distinct experts for a token, all of them real: no capacity limits, no classes beyond the experts.
A rank has room for the copies of all tokens of all ranks while it receives. The operators run on the stream of the
computation, so nothing hides them, as it does the other exchanges.
"""

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from dayzero.kernels.devices import HALF, npu_supports

TOKENS = 512  # of a call
_ALIGNED = 32  # a row's width is a multiple of this
_NARROWEST, _WIDEST = 1024, 8192
_MOST_CHOICES = 16
_COUNTS = 1  # expert_token_nums_type: how many rows each expert gets, not a running sum
_OPERATORS = ("npu_moe_distribute_dispatch_v2", "npu_moe_distribute_combine_v2")


def supports(x: Tensor, choices: int) -> tuple[bool, str]:
    """(ok, reason). x: [T, H], choices: K."""
    ok, reason = npu_supports(_OPERATORS, HALF, x)
    if not ok:
        return False, reason
    if choices > _MOST_CHOICES:
        return False, f"{choices} experts a token are more than {_MOST_CHOICES}"
    narrow, wide = x.shape[1], width_of(x.shape[1], choices)
    if narrow < _NARROWEST or wide > _WIDEST:
        return False, f"rows {narrow} wide, {wide} with weights, are not within {_NARROWEST} to {_WIDEST}"
    return True, ""


def room(ranks: int, experts: int, choices: int) -> int:
    """Rows that a rank has room for in a call: the copies of all tokens of all ranks for its own of the experts."""
    return TOKENS * ranks * min(experts // ranks, choices)


def width_of(hidden: int, choices: int) -> int:
    """Of a row with the weights of its choices, as the operators take it."""
    return _aligned(hidden + 2 * choices)


def communicator(group: ProcessGroup) -> str:
    """The name by which the operators know the group."""
    backend: Any = group._get_backend(torch.device("npu"))
    return backend.get_hccl_comm_name(group.rank())


def own_group(ranks: int) -> ProcessGroup:
    """A group of this rank and its neighbours that nothing else uses. Called by all ranks."""
    group, _ = dist.new_subgroups(ranks)
    assert isinstance(group, ProcessGroup)
    return group


@dataclass
class Dispatch:
    """A move of 512 rows, the first of which are tokens, to the experts' ranks.  [512, W] -> [total, W], by expert.

    ids: [tokens, K], distinct in a row; experts: of all ranks; total: rows that this rank gets. Back, the rows of a
    token are summed.
    """

    ids: Tensor
    experts: int
    total: int
    group: ProcessGroup
    route: tuple[Tensor, Tensor] | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        tokens, choices = self.ids.shape
        self.mask = torch.arange(TOKENS, device=self.ids.device) < tokens
        fill = torch.arange(choices, dtype=torch.int32, device=self.ids.device).expand(TOKENS - tokens, -1)
        self.ids = torch.cat((self.ids.to(torch.int32), fill))

    def there(self, x: Tensor) -> tuple[Tensor, Work | None]:
        places, names = self._common()
        expanded, _, assist, _, received, _, _ = torch.ops.npu.npu_moe_distribute_dispatch_v2(
            _widened(x), self.ids, *places, **names, expert_token_nums_type=_COUNTS
        )
        self.route, self.room = (assist, received), expanded.shape[0]
        return expanded[: self.total, : x.shape[1]].clone(), None  # the rest is room that nobody filled

    def back(self, grad: Tensor) -> tuple[Tensor, Work | None]:
        assert self.route is not None
        assist, received = self.route
        places, names = self._common()
        sums = torch.ops.npu.npu_moe_distribute_combine_v2(
            F.pad(_widened(grad), (0, 0, 0, self.room - grad.shape[0])),
            self.ids,
            assist,
            received,
            torch.ones(self.ids.shape, dtype=torch.float32, device=grad.device),
            *places,
            **names,
        )
        return sums[:, : grad.shape[1]].masked_fill(~self.mask.unsqueeze(1), 0.0), None

    def reverse(self) -> "Combine":
        return Combine(self)

    def _common(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What both operators are told, by place and by name: who takes part, and which of the 512 rows are tokens."""
        ranks = self.group.size()
        places = (communicator(self.group), ranks, self.group.rank(), self.experts)
        return places, {"x_active_mask": self.mask, "shared_expert_num": 0, "global_bs": TOKENS * ranks}


@dataclass
class Combine:
    """The way home of what `dispatch` brought.  [total, W] -> [512, W], the rows of a token summed."""

    dispatch: Dispatch

    def there(self, x: Tensor) -> tuple[Tensor, Work | None]:
        return self.dispatch.back(x)

    def back(self, grad: Tensor) -> tuple[Tensor, Work | None]:
        return self.dispatch.there(grad)

    def reverse(self) -> Dispatch:
        return self.dispatch


def only_own(slot_NK: Tensor, counts: Tensor, total: int) -> Tensor:
    """slot [N, K] of rows that came once for each expert, sorted by it -> the same, but for the row's own expert E and
    more, where E is the number of `counts` [E]."""
    experts = counts.shape[0]
    own = torch.arange(experts, device=slot_NK.device).repeat_interleave(counts, output_size=total)
    return torch.where(slot_NK == own.unsqueeze(1), slot_NK, experts)


def _aligned(width: int) -> int:
    return -(-width // _ALIGNED) * _ALIGNED


def _widened(x: Tensor) -> Tensor:
    return F.pad(x, (0, _aligned(x.shape[1]) - x.shape[1]))
