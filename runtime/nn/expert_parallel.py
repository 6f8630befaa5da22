"""Expert parallelism: token copies travel to the rank that holds their expert, and their results travel back."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from .permutation import permute


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, receive, send, group):
        ctx.receive, ctx.send, ctx.group = receive, send, group
        out = x.new_empty(sum(receive), *x.shape[1:])
        dist.all_to_all_single(out, x.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx, grad):
        out = grad.new_empty(sum(ctx.send), *grad.shape[1:])
        dist.all_to_all_single(out, grad.contiguous(), ctx.send, ctx.receive, group=ctx.group)
        return out, None, None, None


def exchange_experts(
    experts: Callable[[Tensor, Tensor], Tensor], x: Tensor, counts: Tensor, group: ProcessGroup
) -> Tensor:
    """experts(x, counts) where rank r of `group` holds experts r*E/R .. (r+1)*E/R.

    x: [M, H] sorted by global expert, counts: [E] rows of each; returns [M, H] in the same order.
    `experts` is called on every rank even with no rows: its collectives need all ranks.
    Raises ValueError if the experts do not divide evenly over the group.
    """
    ranks = dist.get_world_size(group)
    if counts.numel() % ranks:
        raise ValueError(f"{counts.numel()} experts do not divide over {ranks} expert-parallel ranks")
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    received = received.view(ranks, -1)
    send, receive = counts.view(ranks, -1).sum(1).tolist(), received.sum(1).tolist()

    x = _AllToAll.apply(x, receive, send, group)
    # Rows arrive by source rank, then expert; the experts want them by expert, then source rank.
    local_expert = torch.arange(received.shape[1], device=x.device).repeat(ranks)
    expert_of_row = local_expert.repeat_interleave(received.flatten())
    order = torch.argsort(expert_of_row, stable=True)
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    y = experts(permute(x, order, inverse, 1), received.sum(0))
    return _AllToAll.apply(permute(y, inverse, order, 1), send, receive, group)
