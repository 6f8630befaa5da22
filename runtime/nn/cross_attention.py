"""Attention of a decoder to what its encoder gives (Vaswani et al. 2017, arXiv:1706.03762)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .context import Context
from .linear import reset_linear


class CrossAttention(nn.Module):
    """x: [T, H] -> [T, H]; each token attends to the whole source of its own document (`Context.source`), [U, S].

    output(softmax(scale * (query x) (key source)^T) (value source)), head by head. bias: of the first three.
    """

    uses_context = True
    lora_targets = ("query", "key", "value", "output")

    def __init__(
        self,
        hidden: int,
        source: int,
        heads: int,
        head_dim: int,
        scale: float,
        bias: bool = False,
        output_bias: bool = False,
    ):
        super().__init__()
        self.heads, self.head_dim, self.scale = heads, head_dim, scale
        self.query = nn.Linear(hidden, heads * head_dim, bias=bias)
        self.key = nn.Linear(source, heads * head_dim, bias=bias)
        self.value = nn.Linear(source, heads * head_dim, bias=bias)
        self.output = nn.Linear(heads * head_dim, hidden, bias=output_bias)

    def reset_parameters(self, std: float) -> None:
        for linear in (self.query, self.key, self.value, self.output):
            reset_linear(linear, std)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        if context.source is None:
            raise ValueError("cross attention needs an encoder's states, but the model has no encoder")
        query, key, value = (
            made.unflatten(-1, (self.heads, self.head_dim))
            for made in (self.query(x), self.key(context.source.states), self.value(context.source.states))
        )
        attended = attend_to_source(query, key, value, context.lengths, context.source.lengths, self.scale)
        return self.output(attended.flatten(-2))


def attend_to_source(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], sources: tuple[int, ...], scale: float
) -> Tensor:
    """query: [T, N, D] of documents of these lengths; key, value: [U, N, D] of their sources -> [T, N, D]. A document
    without a source gathers nothing, 0.

    Raises ValueError for another number of sources than of documents.
    """
    if len(lengths) != len(sources):
        raise ValueError(f"{len(lengths)} documents have {len(sources)} sources")
    if len(set(lengths)) == 1 and len(set(sources)) == 1 and sources[0]:
        q, k, v = (
            part.unflatten(0, (len(each), each[0])).transpose(1, 2)
            for part, each in ((query, lengths), (key, sources), (value, sources))
        )
        return F.scaled_dot_product_attention(q, k, v, scale=scale).transpose(1, 2).flatten(0, 1)
    made = []
    parts = (query.split(lengths), key.split(sources), value.split(sources))
    for q, k, v in zip(*parts, strict=True):
        if not len(k):
            made.append(torch.zeros_like(q))
        elif len(q):
            q, k, v = (part.transpose(0, 1)[None] for part in (q, k, v))
            made.append(F.scaled_dot_product_attention(q, k, v, scale=scale)[0].transpose(0, 1))
    return torch.cat(made) if made else torch.zeros_like(query)
