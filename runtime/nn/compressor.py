"""Compressed keys: one entry for every so many tokens of a document (DeepSeek-V4, section 2.3)."""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from .context import Context
from .documents import pack, unpack
from .indexer import chosen, relu_scores
from .linear import reset_linear
from .norm import RMSNorm
from .pooled_indexer import complete, pools_of
from .rotary import RotaryStyle, rotate
from .selected_attention import Indexer


class Compressor(nn.Module):
    """x: [T, H] -> for every run of documents [B, S // rate, head_dim].

    Entry w = RMSNorm(sum_s softmax_s(gate(x_s) + place_s) * value(x_s)) over the tokens s of window w, channel by
    channel; place: [rate, channels]. overlap: value and gate give two series; an entry sums the second series of its
    own window and the first one of the window before. Some channels of an entry, the last or the first of it, are
    turned by the position of its window's first token.
    """

    lora_targets = ()
    parallel_roles: ClassVar = {
        "value": "replicate",
        "gate": "replicate",
        "norm": "replicate",
        "place": "replicate",
    }

    def __init__(
        self,
        hidden: int,
        head_dim: int,
        rate: int,
        norm_eps: float,
        overlap: bool = False,
        rotary: RotaryStyle | None = "interleaved",
        rotary_at: Literal["first", "last"] = "last",
        table: int = 0,
    ):
        super().__init__()
        self.head_dim, self.rate, self.overlap = head_dim, rate, overlap
        self.rotary: RotaryStyle | None = rotary
        self.rotary_at, self.table = rotary_at, table
        channels = 2 * head_dim if overlap else head_dim
        self.value = nn.Linear(hidden, channels, bias=False)
        self.gate = nn.Linear(hidden, channels, bias=False)
        self.place = nn.Parameter(torch.empty(rate, channels))
        self.norm = RMSNorm(head_dim, norm_eps)

    def reset_parameters(self, std: float) -> None:
        for linear in (self.value, self.gate):
            reset_linear(linear, std)
        nn.init.zeros_(self.place)

    def forward(self, x: Tensor, context: Context) -> list[Tensor]:
        tables = context.tables[self.table] if self.rotary is not None else ()
        made = (self.value(x), self.gate(x), *tables)
        found = []
        for value, gate, *angles in zip(*(unpack(part, context.lengths) for part in made), strict=True):
            compute = torch.promote_types(gate.dtype, torch.float32)
            value = pools_of(value, self.rate)
            logits = pools_of(gate, self.rate).to(compute) + self.place.to(compute)
            if self.overlap:
                value = self._with_previous(value, 0.0)
                logits = self._with_previous(logits, float("-inf"))
            entry = self.norm((value * logits.softmax(2).to(value.dtype)).sum(2))
            if self.rotary is not None:
                cos, sin = (pools_of(angle, self.rate)[:, :, 0].flatten(0, 1) for angle in angles)
                turned = rotate(entry.flatten(0, 1)[:, None], cos, sin, self.rotary, self.rotary_at == "last")
                entry = turned[:, 0].view_as(entry)
            found.append(entry)
        return found

    def _with_previous(self, series: Tensor, nothing: float) -> Tensor:
        """[B, W, rate, 2 D] -> [B, W, 2 rate, D]: the first series of the window before, then the second of its own."""
        first, second = series.split(self.head_dim, -1)
        before = torch.cat((torch.full_like(first[:, :1], nothing), first[:, :-1]), 1)
        return torch.cat((before, second), 2)


class CompressedIndexer(Indexer):
    """score(t, w) = sum_h weight_h(x_t) * relu(q_h(c_t) . entry_w), and the top_k entries of windows that end no later
    than t. q = query(c), c the layer's query latent, turned by the token's position; the entries are compressor(x)."""

    lora_targets = ()
    parallel_roles: ClassVar = {"query": "replicate", "weight": "replicate", "compressor": "replicate"}

    def __init__(self, hidden: int, source: int, heads: int, top_k: int, compressor: Compressor):
        super().__init__()
        self.heads, self.top_k, self.unit, self.score_unit = heads, top_k, compressor.rate, compressor.rate
        self.compressor = compressor
        self.query = nn.Linear(source, heads * compressor.head_dim, bias=False)
        self.weight = nn.Linear(hidden, heads, bias=False)

    def reset_parameters(self, std: float) -> None:
        for linear in (self.query, self.weight):
            reset_linear(linear, std)

    def scores(self, x: Tensor, latent: Tensor, context: Context) -> list[Tensor]:
        """For every run of documents [B, 1, S, W], -inf for windows that are not complete."""
        query = self.query(latent).unflatten(-1, (self.heads, -1))
        if self.compressor.rotary is not None:
            cos, sin = context.tables[self.compressor.table]
            query = rotate(query, cos, sin, self.compressor.rotary, self.compressor.rotary_at == "last")
        parts = zip(*(unpack(part, context.lengths) for part in (query, self.weight(x))), strict=True)
        found = []
        for (q, weight), entries in zip(parts, self.compressor(x, context), strict=True):
            scores = relu_scores(q.transpose(1, 2), entries[:, None], weight)
            hidden = ~complete(q.shape[1], self.unit, q.device)
            found.append(scores.masked_fill(hidden, float("-inf"))[:, None])
        return found

    def select(self, scores: list[Tensor], context: Context) -> Tensor:
        """[T, 1, K] entries."""
        widest = min(self.top_k, max(context.lengths, default=0) // self.unit)
        return pack([chosen(found, self.top_k, widest) for found in scores])
