"""Multi-head latent attention: keys and values from one narrow vector a token (DeepSeek-V2, arXiv:2405.04434)."""

from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from dayzero.runtime.rows import gather

from .context import Context
from .cut import Cut
from .index_loss import Judged, add_loss, index_loss
from .linear import reset_linear
from .norm import RMSNorm
from .query_scale import LearnedPositionScale, stepwise_scale
from .rotary import rotate
from .selected_attention import SELECTED, Indexer, Unseeing, attend_selected

LatentRotary = Literal["half", "interleaved", "deinterleaved"]
Gate = Literal["head", "element"]

LATENTS = "latents."  # context.shared: latents of a layer that leaves them, by the name that both layers know


class LatentAttention(nn.Module):
    """x: [T, H] -> [T, H]; each token attends to itself and to what precedes it in its own document.

    c_kv, k_r = kv_down(x), normed apart; [k_n | v] = kv_up(c_kv) per head; key = [k_n | k_r], k_r the same for all
    heads and turned by its position; c_q = query_norm(query_down(x)), or x itself without query_rank; query =
    query_up(c_q), its last rope_dim channels turned; output(gate * softmax(scale * query key^T) v).

    nope_dim, rope_dim: channels of a query that are not and that can be turned; rotary None turns none of them.
    rotary: which channels are a pair; "deinterleaved" takes pairs side by side and gives them one half apart, which
    only layers that exchange latents can tell. key_norm_eps: k_r has a norm. query_scale, kv_scale multiply the normed
    latents. position_scale: queries grow by 1 + position_scale * log(1 + floor(position / position_step)).
    learned_position_scale: by a function of the position that each head learns. query_from: "both" is [c_q | its raw
    form]. gate: sigmoid of gate(x), or of gate(what the query is made from) with gate_from "query", one number a head
    or one a channel. sinks: each head has a logit that takes attention and gives nothing. window: the last tokens only.

    indexer: chooses what each token attends to. Writes context.shared["selected"], [T, 1, K] tokens of the own
    document. selection_from_earlier: no indexer, reads context.shared["selected"] as the last indexer left it.
    unseeing: what a token attends to that nothing is chosen for, see `attend_selected`.
    leaves, takes: a name under which this layer leaves its latents for later layers (context.shared["latents.NAME"] =
    c_kv scaled and turned k_r side by side, [T, kv_rank + rope_dim], with their gradient), or takes those of an earlier
    layer instead of making its own. A model that runs a layer twice must hand it `shared` as it was the first time.

    index_loss_over, index_loss: see `index_loss`.
    """

    uses_context = True
    lora_targets = ("query_down", "query_up", "kv_down", "kv_up", "gate", "output")
    parallel_counts: ClassVar = ("heads",)
    parallel_roles: ClassVar = {
        "query_down": "replicate",
        "query_norm": "replicate",
        "query_up": "column",
        "kv_down": "replicate",
        "kv_norm": "replicate",
        "key_norm": "replicate",
        "kv_up": "column",
        "gate": "column",
        "sinks": "column",
        "query_position": "column",
        "indexer": "replicate",
        "output": "row",
    }

    def __init__(
        self,
        hidden: int,
        heads: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        kv_rank: int,
        scale: float,
        query_rank: int | None = None,
        kv_norm_eps: float = 1e-6,
        query_norm_eps: float = 1e-6,
        key_norm_eps: float | None = None,
        query_scale: float = 1.0,
        kv_scale: float = 1.0,
        rotary: LatentRotary | None = "interleaved",
        table: int = 0,
        position_scale: float = 0.0,
        position_step: int = 8192,
        learned_position_scale: bool = False,
        query_from: Literal["normed", "both"] = "normed",
        gate: Gate | None = None,
        gate_from: Literal["input", "query"] = "input",
        sinks: bool = False,
        latent_bias: bool = False,
        output_bias: bool = False,
        window: int | None = None,
        indexer: Indexer | None = None,
        selection_from_earlier: bool = False,
        unseeing: Unseeing = "itself",
        leaves: str | None = None,
        takes: str | None = None,
    ):
        super().__init__()
        if query_from == "both" and query_rank is None:
            raise ValueError("query_from 'both' needs query_rank: without it there is no latent to norm")
        if indexer is not None and selection_from_earlier:
            raise ValueError("a layer has an indexer or takes an earlier layer's selection, not both")
        if sinks and unseeing == "all":
            raise ValueError("with sinks a token that nothing is chosen for attends to itself only")
        self.unseeing: Unseeing = unseeing
        self.nope_dim, self.rope_dim, self.value_dim, self.kv_rank = nope_dim, rope_dim, value_dim, kv_rank
        self.heads, self.scale, self.window, self.table = heads, scale, window, table
        self.query_scale, self.kv_scale = query_scale, kv_scale
        self.position_scale, self.position_step = position_scale, position_step
        self.rotary: LatentRotary | None = rotary if rope_dim else None
        self.query_rank, self.query_from, self.gate_from = query_rank, query_from, gate_from
        self.selection_from_earlier, self.leaves, self.takes = selection_from_earlier, leaves, takes
        source = hidden
        if query_rank is not None:
            self.query_down = nn.Linear(hidden, query_rank, bias=latent_bias)
            self.query_norm = RMSNorm(query_rank, query_norm_eps)
            source = 2 * query_rank if query_from == "both" else query_rank
        self.query_up = nn.Linear(source, heads * (nope_dim + rope_dim), bias=False)
        if takes is None:
            self.kv_down = nn.Linear(hidden, kv_rank + rope_dim, bias=latent_bias)
            self.kv_norm = RMSNorm(kv_rank, kv_norm_eps)
            self.key_norm = RMSNorm(rope_dim, key_norm_eps) if key_norm_eps is not None else None
        self.kv_up = nn.Linear(kv_rank, heads * (nope_dim + value_dim), bias=False)
        gates = {None: 0, "head": heads, "element": heads * value_dim}[gate]
        self.gate = nn.Linear(source if gate_from == "query" else hidden, gates, bias=False) if gate else None
        self.query_position = LearnedPositionScale(heads) if learned_position_scale else None
        self.sinks = nn.Parameter(torch.empty(heads)) if sinks else None
        self.output = nn.Linear(heads * value_dim, hidden, bias=output_bias)
        self.indexer = indexer
        self.index_loss_over: Judged | None = None
        self.index_loss: Tensor | None = None

    @property
    def context_parallel(self) -> bool:
        return self.indexer is None and not self.selection_from_earlier

    def reset_parameters(self, std: float) -> None:
        for linear in self.children():
            if isinstance(linear, nn.Linear):
                reset_linear(linear, std)
        if self.sinks is not None:
            nn.init.zeros_(self.sinks)

    def forward(self, x: Tensor, context: Context) -> Tensor:
        latent, source = self._query_latent(x)
        query = self._query(source, context)
        compressed, turned = self._latents(x, context)
        if isinstance(context.lengths, Cut):  # latents travel: they are much narrower than the heads' keys and values
            both = gather(torch.cat((compressed, turned), -1), context.lengths.span)
            compressed, turned = both.split([self.kv_rank, self.rope_dim], -1)
        keys, value = self.kv_up(compressed).unflatten(-1, (self.heads, -1)).split([self.nope_dim, self.value_dim], -1)
        key = torch.cat((keys, turned[:, None].expand(-1, self.heads, -1)), -1) if self.rope_dim else keys
        index, unit = self._selection(x, latent, query, key, context)
        attended = attend_selected(
            query, key, value, context.lengths, self.scale, index, unit, self.window, self.sinks, self.unseeing
        )
        if self.gate is not None:
            gate = self.gate(source if self.gate_from == "query" else x)
            compute = torch.promote_types(x.dtype, torch.float32)
            gate = gate.to(compute).sigmoid().to(x.dtype)
            attended = attended * gate.unflatten(-1, (self.heads, -1))
        return self.output(attended.flatten(-2))

    def _query_latent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """What the indexer's queries are made from, and what the layer's own are made from."""
        if self.query_rank is None:
            return x, x
        raw = self.query_down(x)
        latent = self.query_norm(raw)
        if self.query_scale != 1.0:
            latent = latent * self.query_scale
        return latent, torch.cat((latent, raw), -1) if self.query_from == "both" else latent

    def _query(self, source: Tensor, context: Context) -> Tensor:
        query = self.query_up(source).unflatten(-1, (self.heads, -1))
        if self.rotary is not None:
            fixed, turned = query.split([self.nope_dim, self.rope_dim], -1)
            query = torch.cat((fixed, self._turn(turned, context)), -1)
        if self.position_scale:
            growth = stepwise_scale(context.position, self.position_scale, self.position_step)
            query = query * growth.to(query.dtype)[:, None, None]
        return self.query_position(query, context.position) if self.query_position is not None else query

    def _latents(self, x: Tensor, context: Context) -> tuple[Tensor, Tensor]:
        """[T, kv_rank] and the turned key part [T, rope_dim]."""
        if self.takes is not None:
            if LATENTS + self.takes not in context.shared:
                raise ValueError(f"this attention takes latents {self.takes!r}, but no earlier layer left them")
            compressed, turned = context.shared[LATENTS + self.takes].split([self.kv_rank, self.rope_dim], -1)
            return compressed, turned
        compressed, turned = self.kv_down(x).split([self.kv_rank, self.rope_dim], -1)
        compressed = self.kv_norm(compressed)
        if self.kv_scale != 1.0:
            compressed = compressed * self.kv_scale
        if self.key_norm is not None:
            turned = self.key_norm(turned)
        if self.rotary is not None:
            turned = self._turn(turned[:, None], context)[:, 0]
        if self.leaves is not None:
            context.shared[LATENTS + self.leaves] = torch.cat((compressed, turned), -1)
        return compressed, turned

    def _turn(self, part: Tensor, context: Context) -> Tensor:
        if self.table >= len(context.tables):
            raise ValueError("this attention rotates queries and keys, but the model has no such rotary tables")
        cos, sin = context.tables[self.table]
        turned = rotate(part, cos, sin, "half" if self.rotary == "half" else "interleaved")
        return torch.cat((turned[..., 0::2], turned[..., 1::2]), -1) if self.rotary == "deinterleaved" else turned

    def _selection(
        self, x: Tensor, latent: Tensor, query: Tensor, key: Tensor, context: Context
    ) -> tuple[Tensor | None, int]:
        if self.selection_from_earlier:
            if SELECTED not in context.shared:
                raise ValueError("this attention takes an earlier layer's selection, but none was made")
            return context.shared[SELECTED], 1
        if self.indexer is None or not x.shape[0]:
            return None, 1
        learns = self.index_loss_over is not None and torch.is_grad_enabled()
        with torch.set_grad_enabled(learns):
            scores = self.indexer.scores(x.detach(), latent.detach(), context)
        index = self.indexer.select(scores, context)
        context.shared[SELECTED] = index
        if learns and self.index_loss_over is not None:
            loss = index_loss(
                scores,
                query.detach(),
                key.detach(),
                index,
                context.lengths,
                self.scale,
                self.indexer,
                self.index_loss_over,
            )
            add_loss(self, loss)
        return index, self.indexer.unit
