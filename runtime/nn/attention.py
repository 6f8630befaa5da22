"""Softmax attention with grouped key/value heads (Ainslie et al. 2023, arXiv:2305.13245)."""

from typing import ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .attend import Bias, Visibility, attend
from .causal_convolution import causal_convolution
from .context import Context
from .linear import reset_linear
from .norm import RMSNorm
from .query_scale import QueryScale, query_scale
from .rotary import RotaryStyle, rotate

QKNorm = Literal["none", "head", "whole"]
OutputGate = Literal["sigmoid", "softplus", "silu", "tanh"]

KEYS, VALUES = "keys.", "values."  # context.shared: those of a layer that leaves them, by the name that both know
GATES = {"sigmoid": torch.sigmoid, "softplus": F.softplus, "silu": F.silu, "tanh": torch.tanh}


class GroupedQueryAttention(nn.Module):
    """x: [T, H] -> [T, out]; each token attends to itself and to what precedes it in its own document.

    query, key, value = the projections of x, each normed, scaled and turned as said below;
    output(gate * softmax(scale * query key^T) value).

    Projections. value_dim: size of a value head where it is not head_dim. out: width of the output where it is not H.
    value_is_key: values are the projected keys, before their norm. clip: the projections are clamped to [-clip, clip],
    after a norm of whole vectors and before one of heads. convolution: projected keys and values are mixed with their
    predecessors, channel by channel: k_t + sum_i w[:, W-1-i] * k_{t-i} over so many tokens W (key_mix, value_mix).
    Norms. qk_norm: RMS norm of queries and keys over each head ("head") or over all heads at once ("whole");
    qk_norm_scaled: with a weight; qk_norm_after_rotary: not before the rotation but after it. value_norm_eps,
    output_norm_eps: RMS norm without weight of each head's value, or of what each head has gathered.
    Factors. query_factor, key_factor, value_factor multiply these after the norms. query_scale: queries grow with
    their position (`query_scale.py`), with query_scale_factor and query_scale_length.
    Rotation. rotary: the pairs of channels that turn by the model's table number `table`, None for no positions;
    rotary_last: the last channels of a head turn, where the table has fewer than a head.
    Visibility. window: the last `window` tokens only. chunk: those in the same run of `chunk` positions only.
    causal: False lets tokens also see what follows. softcap: scores are softcap * tanh(scores / softcap).
    sinks: a learned logit a head takes attention and gives nothing.
    Gate. gate: what each head has gathered is multiplied by gate(projection of x): one number a channel, or one a head
    (gate_per_head). gate_bias: a learned number a head is added before the activation.
    Sharing. leaves, takes: a name under which this layer leaves its keys, turned, and values for later layers
    (context.shared["keys.NAME"], [T, G, D], with their gradient), or takes those of an earlier layer instead of making
    its own.
    """

    uses_context = True
    context_parallel = True
    lora_targets = ("query", "key", "value", "gate", "output")
    parallel_counts: ClassVar = ("heads", "kv_heads")

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
        *,
        value_dim: int | None = None,
        out: int | None = None,
        value_is_key: bool = False,
        qk_norm_scaled: bool = True,
        qk_norm_after_rotary: bool = False,
        value_norm_eps: float | None = None,
        output_norm_eps: float | None = None,
        query_factor: float = 1.0,
        key_factor: float = 1.0,
        value_factor: float = 1.0,
        query_scale: QueryScale | None = None,
        query_scale_factor: float = 0.0,
        query_scale_length: float = 1.0,
        rotary_last: bool = False,
        convolution: int | None = None,
        chunk: int | None = None,
        causal: bool = True,
        softcap: float | None = None,
        sinks: bool = False,
        gate: OutputGate | None = None,
        gate_per_head: bool = False,
        gate_bias: bool = False,
        leaves: str | None = None,
        takes: str | None = None,
    ):
        super().__init__()
        if heads % kv_heads:
            raise ValueError(f"{heads} heads cannot share {kv_heads} key/value heads evenly")
        self.value_dim = head_dim if value_dim is None else value_dim
        if value_is_key and convolution is not None:
            raise ValueError("values that are the keys cannot be mixed by themselves")
        if value_is_key and self.value_dim != head_dim:
            raise ValueError(f"values of size {value_dim} cannot be the keys of size {head_dim}")
        if not causal and chunk is None and window is not None and window < 1:
            raise ValueError(f"a window of {window} tokens shows nothing")
        if takes is not None and (leaves is not None or convolution is not None or value_is_key):
            raise ValueError("keys and values that are taken from an earlier layer are neither left nor made")
        self.heads, self.kv_heads, self.head_dim, self.scale = heads, kv_heads, head_dim, scale
        self.qk_norm, self.qk_norm_after_rotary, self.clip = qk_norm, qk_norm_after_rotary, clip
        self.query_factor, self.key_factor, self.value_factor = query_factor, key_factor, value_factor
        self.query_scale: QueryScale | None = query_scale
        self.query_scale_factor, self.query_scale_length = query_scale_factor, query_scale_length
        self.rotary: RotaryStyle | None = rotary
        self.rotary_last, self.table, self.softcap = rotary_last, table, softcap
        self.visible = Visibility(causal, window, chunk)
        self.leaves, self.takes = leaves, takes
        self.query = nn.Linear(hidden, heads * head_dim, bias=bias)
        self.key = nn.Linear(hidden, kv_heads * head_dim, bias=bias) if takes is None else None
        own_value = takes is None and not value_is_key
        self.value = nn.Linear(hidden, kv_heads * self.value_dim, bias=bias) if own_value else None
        self.output = nn.Linear(heads * self.value_dim, hidden if out is None else out, bias=output_bias)
        if convolution is not None:
            self.key_mix, self.value_mix = (
                nn.Parameter(torch.empty(kv_heads * dim, convolution)) for dim in (head_dim, self.value_dim)
            )
        self.convolution = convolution
        self.query_norm = self.key_norm = None
        if qk_norm != "none":
            sizes = [head_dim if qk_norm == "head" else count * head_dim for count in (heads, kv_heads)]
            query_norm, key_norm = (RMSNorm(size, qk_norm_eps, qk_norm_offset, qk_norm_scaled) for size in sizes)
            self.query_norm, self.key_norm = query_norm, key_norm if takes is None else None
        self.value_norm = RMSNorm(self.value_dim, value_norm_eps, scaled=False) if value_norm_eps is not None else None
        self.output_norm = (
            RMSNorm(self.value_dim, output_norm_eps, scaled=False) if output_norm_eps is not None else None
        )
        self.gate_act: OutputGate | None = gate
        self.gate = nn.Linear(hidden, heads * (1 if gate_per_head else self.value_dim), bias=False) if gate else None
        self.gate_bias = nn.Parameter(torch.empty(heads)) if gate_bias else None
        self.sinks = nn.Parameter(torch.empty(heads)) if sinks else None

    @property
    def parallel_roles(self) -> dict[str, str]:
        whole = self.qk_norm == "whole"
        return {
            "query": "column",
            "key": "column:kv_heads",
            "value": "column:kv_heads",
            "query_norm": "column" if whole else "replicate",
            "key_norm": "column:kv_heads" if whole else "replicate",
            "key_mix": "column:kv_heads",
            "value_mix": "column:kv_heads",
            "gate": "column",
            "gate_bias": "column",
            "sinks": "column",
            "output": "row",
        }

    def reset_parameters(self, std: float) -> None:
        for linear in self.children():
            if isinstance(linear, nn.Linear):
                reset_linear(linear, std)
        for vector in (self.gate_bias, self.sinks):
            if vector is not None:
                nn.init.zeros_(vector)
        if self.convolution is not None:
            nn.init.zeros_(self.key_mix)
            nn.init.zeros_(self.value_mix)

    def forward(self, x: Tensor, context: Context, bias: Bias | None = None) -> Tensor:
        """bias: added to the scaled scores."""
        if self.takes is None:
            query, key, value = self.projections(x, context)
            query, key = self.positioned(query, key, context)
        else:
            query = self._grown(self._turned(self._queries(x), self.query_norm, context), context)
            key, value = self._taken(context)
        if self.leaves is not None:
            context.shared[KEYS + self.leaves], context.shared[VALUES + self.leaves] = key, value
        attended = attend(
            query,
            key,
            value,
            context.lengths,
            self.scale,
            self.visible,
            self.softcap,
            self.sinks,
            bias,
        )
        return self.output(self.gated(attended, x).flatten(-2))

    def _taken(self, context: Context) -> tuple[Tensor, Tensor]:
        if f"{KEYS}{self.takes}" not in context.shared:
            raise ValueError(f"this attention takes keys and values {self.takes!r}, but no earlier layer left them")
        return context.shared[f"{KEYS}{self.takes}"], context.shared[f"{VALUES}{self.takes}"]

    def projections(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, N, D], keys [T, G, D] and values [T, G, Dv]: projected, normed unless later, scaled."""
        assert self.key is not None
        key, value = self.key(x), None if self.value is None else self.value(x)
        if self.convolution is not None and value is not None:
            key = key + causal_convolution(key, self.key_mix, None, context.lengths)
            value = value + causal_convolution(value, self.value_mix, None, context.lengths)
        key = self._heads_of(key, self.key_norm)
        if value is None:
            value = key
        else:
            value = value if self.clip is None else value.clamp(-self.clip, self.clip)
            value = value.unflatten(-1, (-1, self.value_dim))
        key = self._normed(key, self.key_norm, self.key_factor)
        if self.value_norm is not None:
            value = self.value_norm(value)
        return self._queries(x), key, value if self.value_factor == 1.0 else value * self.value_factor

    def _queries(self, x: Tensor) -> Tensor:
        query = self._heads_of(self.query(x), self.query_norm)
        return self._normed(query, self.query_norm, self.query_factor)

    def _heads_of(self, part: Tensor, norm: RMSNorm | None) -> Tensor:
        """[T, heads, D] of projected queries or keys."""
        if self.qk_norm == "whole" and norm is not None:
            part = norm(part)
        if self.clip is not None:
            part = part.clamp(-self.clip, self.clip)
        return part.unflatten(-1, (-1, self.head_dim))

    def _normed(self, part: Tensor, norm: RMSNorm | None, factor: float) -> Tensor:
        if self.qk_norm == "head" and norm is not None and not self.qk_norm_after_rotary:
            part = norm(part)
        return part if factor == 1.0 else part * factor

    def positioned(self, query: Tensor, key: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """Turned by their positions, and queries scaled by theirs."""
        query, key = self._turned(query, self.query_norm, context), self._turned(key, self.key_norm, context)
        return self._grown(query, context), key

    def _turned(self, part: Tensor, norm: RMSNorm | None, context: Context) -> Tensor:
        if self.rotary is not None:
            if self.table >= len(context.tables):
                raise ValueError("this attention rotates queries and keys, but the model has no such rotary tables")
            part = rotate(part, *context.tables[self.table], self.rotary, self.rotary_last)
        if self.qk_norm == "head" and norm is not None and self.qk_norm_after_rotary:
            part = norm(part)
        return part

    def _grown(self, query: Tensor, context: Context) -> Tensor:
        growth = self.growth(context, query.dtype)
        return query if growth is None else query * growth[:, None, None].to(query.dtype)

    def growth(self, context: Context, dtype: torch.dtype) -> Tensor | None:
        """[T]: what queries are multiplied by at their positions."""
        if self.query_scale is None:
            return None
        return query_scale(self.query_scale, context, self.query_scale_factor, self.query_scale_length, dtype)

    def gated(self, attended: Tensor, x: Tensor) -> Tensor:
        """attended: [T, N, Dv], normed and gated by x."""
        if self.output_norm is not None:
            attended = self.output_norm(attended)
        if self.gate is None or self.gate_act is None:
            return attended
        gate = self.gate(x).unflatten(-1, (self.heads, -1))
        if self.gate_bias is not None:
            gate = gate + self.gate_bias[:, None]
        compute = torch.promote_types(gate.dtype, torch.float32)
        return attended * GATES[self.gate_act](gate.to(compute)).to(attended.dtype)
