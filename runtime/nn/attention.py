"""Causal softmax attention with grouped key/value heads (Ainslie et al. 2023, arXiv:2305.13245)."""

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .context import Context
from .linear import reset_linear
from .norm import RMSNorm
from .rotary import RotaryStyle, rotate

QKNorm = Literal["none", "head", "whole"]


class GroupedQueryAttention(nn.Module):
    """x: [T, H] -> [T, H]; each token attends to itself and to what precedes it in its own document.

    qk_norm: RMS norm of queries and keys, over each head ("head") or over all heads at once ("whole"),
    before the rotary embedding. window: attend to the last `window` tokens only.
    clip: queries, keys and values are clamped to [-clip, clip] right after their projections (and norms).
    table: which of the model's rotary tables this layer uses.
    """

    uses_context = True
    lora_targets = ("query", "key", "value", "output")

    def __init__(
        self,
        hidden: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        scale: float,
        rotary: RotaryStyle | None = "half",
        qk_norm: QKNorm = "none",
        qk_norm_eps: float = 0.0,
        qk_norm_offset: float = 0.0,
        bias: bool = False,
        output_bias: bool = False,
        window: int | None = None,
        clip: float | None = None,
        table: int = 0,
    ):
        super().__init__()
        if heads % kv_heads:
            raise ValueError(f"{heads} heads cannot share {kv_heads} key/value heads evenly")
        self.heads, self.kv_heads, self.head_dim = heads, kv_heads, head_dim
        self.scale, self.qk_norm, self.window, self.clip, self.table = scale, qk_norm, window, clip, table
        self.rotary: RotaryStyle | None = rotary
        self.query = nn.Linear(hidden, heads * head_dim, bias=bias)
        self.key = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.value = nn.Linear(hidden, kv_heads * head_dim, bias=bias)
        self.output = nn.Linear(heads * head_dim, hidden, bias=output_bias)
        if qk_norm != "none":
            per_head = qk_norm == "head"
            self.query_norm = RMSNorm(head_dim if per_head else heads * head_dim, qk_norm_eps, qk_norm_offset)
            self.key_norm = RMSNorm(head_dim if per_head else kv_heads * head_dim, qk_norm_eps, qk_norm_offset)

    def reset_parameters(self, std: float) -> None:
        for linear in (self.query, self.key, self.value, self.output):
            reset_linear(linear, std)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.qk_norm == "whole":
            query, key = self.query_norm(query), self.key_norm(key)
        if self.clip is not None:
            query, key, value = (part.clamp(-self.clip, self.clip) for part in (query, key, value))
        query = query.unflatten(-1, (-1, self.head_dim))
        key = key.unflatten(-1, (-1, self.head_dim))
        value = value.unflatten(-1, (-1, self.head_dim))
        if self.qk_norm == "head":
            query, key = self.query_norm(query), self.key_norm(key)
        if self.rotary is not None:
            if self.table >= len(context.tables):
                raise ValueError("this attention rotates queries and keys, but the model has no such rotary tables")
            cos, sin = context.tables[self.table]
            query, key = rotate(query, cos, sin, self.rotary), rotate(key, cos, sin, self.rotary)
        attended = attend(query, key, value, context.lengths, self.scale, self.window)
        return self.output(attended.flatten(-2))


def attend(
    query: Tensor, key: Tensor, value: Tensor, lengths: tuple[int, ...], scale: float, window: int | None = None
) -> Tensor:
    """Causal attention inside each document. query: [T, N, D]; key, value: [T, G, D]. Returns [T, N, D]."""
    if lengths and len(set(lengths)) == 1:
        shape = (len(lengths), lengths[0])
        q, k, v = (part.unflatten(0, shape).transpose(1, 2) for part in (query, key, value))
        return _attend_batch(q, k, v, scale, window).transpose(1, 2).flatten(0, 1)
    parts = []
    for document in zip(query.split(lengths), key.split(lengths), value.split(lengths), strict=True):
        if document[0].shape[0]:
            q, k, v = (part.transpose(0, 1)[None] for part in document)
            parts.append(_attend_batch(q, k, v, scale, window)[0].transpose(0, 1))
    return torch.cat(parts) if parts else query


def _attend_batch(query: Tensor, key: Tensor, value: Tensor, scale: float, window: int | None) -> Tensor:
    """query: [B, N, S, D]; key, value: [B, G, S, D] -> [B, N, S, D]."""
    length = query.shape[2]
    grouped = query.shape[1] != key.shape[1]
    if window is None or window >= length:
        return F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scale, enable_gqa=grouped)
    age = torch.arange(length, device=query.device)[:, None] - torch.arange(length, device=query.device)
    visible = (age >= 0) & (age < window)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=visible, scale=scale, enable_gqa=grouped)
