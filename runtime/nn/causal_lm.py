"""A language model put together from blocks: a decoder, which an encoder may stand beside."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from dayzero.runtime.loss import Head, summed_cross_entropy

from .context import Context, Source, lengths_of, positions_of
from .encoder import Encoder
from .layer_inputs import LAYER_INPUT
from .loop import Loop, Stream

if TYPE_CHECKING:
    from dayzero.runtime.split import Split


class CausalLM(nn.Module):
    """Token ids to logits, or straight to the summed loss.

    rotaries: the tables that layers choose from, in order. query_scale: factors by position, handed to all layers.
    tied: the head reuses the embedding matrix; otherwise it has its own, [V, H]. embed_scale multiplies the embeddings,
    embed_norm follows them. The logits are logit_softcap * tanh(logit_scale * (W x + b) / logit_softcap); logit_softcap
    None: just scaled. logit_rows: of a head padded to a round number of rows, those that are tokens. head_rows: of a
    head with fewer rows than the embedding.

    streams: copies of the embeddings that layers pass on, [T, streams, H]; merge makes [T, H] of them after the last
    layer. history: layers hand on a tuple of what was kept of the stream and the stream itself (`DecoderLayer`); merge
    is given all of it, or there is none and the stream alone goes on.

    loop: layers that run several times.

    shared: sets of parts that several layers have; the layers refer to them (`DecoderLayer`), parameters are held here.

    positions: of tokens, added to their embeddings. encoder: reads a source for each document, which layers with cross
    attention look at; its embedding is the decoder's unless it has its own.
    layer_inputs: what it gives for the embeddings and the ids, [T, layers, P], is handed to the layers one by one.
    """

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        rotaries: Sequence[nn.Module] = (),
        query_scale: nn.Module | None = None,
        tied: bool = False,
        embed_scale: float = 1.0,
        embed_norm: nn.Module | None = None,
        head_bias: bool = False,
        logit_scale: float = 1.0,
        logit_softcap: float | None = None,
        logit_rows: int | None = None,
        streams: int = 1,
        merge: nn.Module | None = None,
        history: bool = False,
        head_rows: int | None = None,
        encoder: Encoder | None = None,
        positions: nn.Module | None = None,
        layer_inputs: nn.Module | None = None,
        shared: Sequence[Mapping[str, nn.Module]] = (),
        loop: Loop | None = None,
    ):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(layers)
        self.shared = nn.ModuleList(nn.ModuleDict(parts) for parts in shared)
        self.norm, self.loop = norm, loop
        self.rotaries = nn.ModuleList(rotaries)
        self.query_scale = query_scale
        self.embed_scale, self.embed_norm = embed_scale, embed_norm
        self.logit_scale, self.logit_softcap, self.logit_rows = logit_scale, logit_softcap, logit_rows
        self.streams, self.merge, self.history = streams, merge, history
        rows = vocabulary if head_rows is None else head_rows
        self.head = None if tied else nn.Linear(hidden, rows, bias=False)
        self.head_bias = nn.Parameter(torch.empty(rows)) if head_bias else None
        self.encoder, self.positions = encoder, positions
        self.layer_inputs = layer_inputs
        self.split: Split | None = None

    @property
    def all_layers(self) -> list[nn.Module]:
        """In the order in which they run: the encoder's, then the decoder's."""
        return [*(self.encoder.layers if self.encoder is not None else ()), *self.layers]

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.embed.weight, std=std)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=std)
        if self.head_bias is not None:
            nn.init.zeros_(self.head_bias)

    def forward(
        self,
        ids: Tensor,
        cu_seqlens: Tensor,
        labels: Tensor | None = None,
        loss_chunk: int | None = None,
        source: tuple[Tensor, Tensor] | None = None,
    ) -> Tensor:
        """ids: [T] int64, documents end to end; cu_seqlens: [documents + 1].

        Without labels: logits [T, V]. With labels [T] (-100 where no loss is wanted; already shifted: labels[t] is
        what follows ids[t]): the summed cross entropy, a float32 scalar (float64 for float64 models). loss_chunk:
        tokens whose logits exist at a time.

        source: (ids, cu_seqlens) of what the encoder reads, a source for each document; None for the documents
        themselves, which it then sees whole, what is yet to be predicted included.
        """
        lengths = lengths_of(cu_seqlens, ids.shape[0])
        position = positions_of(lengths, ids.device)
        x = self.embed(ids)
        if self.embed_scale != 1.0:
            x = x * self.embed_scale
        if self.positions is not None:
            x = x + self.positions(ids, lengths, x.dtype)
        if self.embed_norm is not None:
            x = self.embed_norm(x)
        tables = tuple(rotary(position, x.dtype) for rotary in self.rotaries)
        shared = {} if self.query_scale is None else {"query_scale": self.query_scale(position, x.dtype)}
        states = None if self.encoder is None else self._encoded(*(source or (ids, cu_seqlens)))
        context = Context(cu_seqlens, lengths, position, tables, ids, shared, states)
        if self.split is not None:
            context = self.split.context(context)  # type: ignore[arg-type]
        inputs = self._layer_inputs(x, ids)
        if self.streams > 1:
            x = x[:, None].expand(-1, self.streams, -1)
        if self.history:
            x = (x,)

        def run(x: Stream, numbers: range, messages: Sequence[tuple[Tensor, ...]] | None) -> Stream:
            nonlocal context
            for number in numbers:
                # Each has its own view of what earlier ones left: recomputed later, it finds what it found the first
                # time.
                own = {} if inputs is None else {LAYER_INPUT: inputs[:, number]}
                message = None if messages is None else messages[number - numbers.start]
                context = replace(context, shared={**context.shared, **own}, message=message)
                x = self.layers[number](x, context)
            return x

        everything = range(len(self.layers))
        x = run(x, everything, None) if self.loop is None else self.loop(x, run, len(everything))
        if self.merge is not None:
            x = self.merge(*x) if isinstance(x, tuple) else self.merge(x)
        x = self.norm(x[-1] if isinstance(x, tuple) else x)
        weight = self.embed.weight if self.head is None else self.head.weight
        head = Head(weight, self.head_bias, self.logit_scale, self.logit_softcap, self.logit_rows)
        if self.split is not None:
            return self.split.logits(x, head) if labels is None else self.split.loss(x, head, labels, loss_chunk)
        return head.logits(x) if labels is None else summed_cross_entropy(x, head, labels, loss_chunk)

    def _layer_inputs(self, x: Tensor, ids: Tensor) -> Tensor | None:
        """[T, layers, P] of the rank's own rows, x."""
        if self.layer_inputs is None:
            return None
        return self.layer_inputs(x, ids if self.split is None else self.split.own(ids))

    def _encoded(self, ids: Tensor, cu_seqlens: Tensor) -> Source:
        assert self.encoder is not None
        lengths = lengths_of(cu_seqlens, ids.shape[0])
        rows = self.embed(ids) if self.encoder.embed is None else self.encoder.embed(ids)
        return self.encoder(rows, ids, cu_seqlens, lengths)


def initialise(model: nn.Module, std: float, seed: int) -> None:
    """Random weights for a model that starts from nothing: every block resets its own parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in model.modules():
            if hasattr(module, "reset_parameters") and not isinstance(module, (nn.Linear, nn.Embedding)):
                module.reset_parameters(std)  # type: ignore[operator]
