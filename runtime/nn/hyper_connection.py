"""Hyper-connections: a stream of several copies of the residual, mixed in and out around every block.

Zhu et al. 2024 (arXiv:2409.19606); constrained to doubly stochastic mixing by Xie et al. 2025 (arXiv:2512.24880).
"""

from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dayzero.kernels.rms_norm import rms_norm

from .context import Context
from .gated_residual import GatedConnection


class HyperConnection(nn.Module):
    """streams: [T, n, H] -> what a block reads [T, H], and how its output goes back: post [T, n], mix [T, n, n].

        (p, q, m) = W rms(flat(streams)) * scale + bias
        pre = sigmoid(p) + eps        reads sum_i pre_i streams_i
        post = post_scale * sigmoid(q) + post_eps
        mix = softmax(m) + eps, then made doubly stochastic: columns, then `iterations` - 1 times rows and columns,
        each divided by its sum + eps (Sinkhorn and Knopp 1967)

    iterations None: there is no mix, the streams are kept as they are. weight: [2n (+ n^2), n H], bias likewise, scale:
    [2] or [3]; all computed in float32 at least.
    """

    def __init__(
        self,
        hidden: int,
        streams: int,
        norm_eps: float,
        eps: float,
        post_scale: float = 2.0,
        post_eps: float = 0.0,
        iterations: int | None = None,
    ):
        super().__init__()
        self.streams, self.norm_eps, self.eps = streams, norm_eps, eps
        self.post_scale, self.post_eps, self.iterations = post_scale, post_eps, iterations
        rows = 2 * streams + (streams**2 if iterations is not None else 0)
        self.weight = nn.Parameter(torch.empty(rows, streams * hidden))
        self.bias = nn.Parameter(torch.empty(rows))
        self.scale = nn.Parameter(torch.empty(2 if iterations is None else 3))

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)
        nn.init.zeros_(self.bias)
        nn.init.ones_(self.scale)

    def forward(self, streams: Tensor) -> tuple[Tensor, Tensor] | tuple[Tensor, Tensor, Tensor]:
        wide = torch.promote_types(streams.dtype, torch.float32)
        n = self.streams
        flat = rms_norm(streams.to(wide).flatten(1), None, self.norm_eps)
        sizes = [n, n] if self.iterations is None else [n, n, n * n]
        parts = F.linear(flat, self.weight.to(wide)).split(sizes, -1)
        scales, biases = self.scale.to(wide).unbind(0), self.bias.to(wide).split(sizes)
        logits = [part * scale + bias for part, scale, bias in zip(parts, scales, biases, strict=True)]
        pre = logits[0].sigmoid() + self.eps
        post = self.post_scale * logits[1].sigmoid() + self.post_eps
        read = (pre[..., None] * streams).sum(1).to(streams.dtype)
        if self.iterations is None:
            return read, post
        mix = logits[2].unflatten(-1, (n, n)).softmax(-1) + self.eps
        mix = mix / (mix.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.iterations - 1):
            mix = mix / (mix.sum(-1, keepdim=True) + self.eps)
            mix = mix / (mix.sum(-2, keepdim=True) + self.eps)
        return read, post, mix


class HyperConnected(nn.Module):
    """A block between streams: [T, n, H] -> [T, n, H].

    y = block(norm(read)), or block(read) without a norm; stream i becomes post_i y + sum_j mix_ji streams_j, or
    post_i y + streams_i without mixing.
    """

    uses_context = True
    parallel_inner: ClassVar = ("block",)

    def __init__(self, connection: HyperConnection | GatedConnection, norm: nn.Module | None, block: nn.Module):
        super().__init__()
        self.connection, self.norm, self.block = connection, norm, block

    def forward(self, streams: Tensor, context: Context) -> Tensor:
        read, post, *mix = self.connection(streams)
        normed = read if self.norm is None else self.norm(read)
        y = self.block(normed, context) if getattr(self.block, "uses_context", False) else self.block(normed)
        kept = mix[0].to(streams.dtype).transpose(-1, -2) @ streams if mix else streams
        return post.to(y.dtype)[..., None] * y[:, None] + kept


class StreamMerge(nn.Module):
    """What the streams come to after the last layer: [T, n, H] -> [T, H].

    sum_i (sigmoid(scale W_i rms(flat) + b_i) + eps) streams_i.  weight: [n, n H], bias: [n], scale: [1].
    """

    def __init__(self, hidden: int, streams: int, norm_eps: float, eps: float):
        super().__init__()
        self.norm_eps, self.eps = norm_eps, eps
        self.weight = nn.Parameter(torch.empty(streams, streams * hidden))
        self.bias = nn.Parameter(torch.empty(streams))
        self.scale = nn.Parameter(torch.empty(1))

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.weight, std=std)
        nn.init.zeros_(self.bias)
        nn.init.ones_(self.scale)

    def forward(self, streams: Tensor) -> Tensor:
        wide = torch.promote_types(streams.dtype, torch.float32)
        flat = rms_norm(streams.to(wide).flatten(1), None, self.norm_eps)
        logits = F.linear(flat, self.weight.to(wide)) * self.scale.to(wide) + self.bias.to(wide)
        return ((logits.sigmoid() + self.eps)[..., None] * streams).sum(1).to(streams.dtype)


class StreamMean(nn.Module):
    """The mean over streams: [T, n, H] -> [T, H]."""

    def __init__(self) -> None:
        super().__init__()

    def forward(self, streams: Tensor) -> Tensor:
        return streams.mean(1)
