"""The encoder beside a decoder: layers in which every token of a source sees all of it."""

import itertools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from .context import Context, Source, positions_of

NO_LOSS = -100  # the label of a token that is not trained


class Encoder(nn.Module):
    """Embeddings of sources [U, H] to their states [U, H].

    layers: as a decoder's, but for what their attention shows. embed: the encoder's own table [V, H], None where the
    decoder's is used. embed_scale multiplies the rows, positions are added to them.
    """

    def __init__(
        self,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        vocabulary: int | None = None,
        hidden: int = 0,
        embed_scale: float = 1.0,
        positions: nn.Module | None = None,
    ):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden) if vocabulary is not None else None
        self.embed_scale, self.positions = embed_scale, positions
        self.layers, self.norm = nn.ModuleList(layers), norm

    def reset_parameters(self, std: float) -> None:
        if self.embed is not None:
            nn.init.normal_(self.embed.weight, std=std)

    def forward(self, rows: Tensor, ids: Tensor, cu_seqlens: Tensor, lengths: tuple[int, ...]) -> Source:
        """rows: [U, H], of the embedding for ids [U]; documents end to end."""
        x = rows if self.embed_scale == 1.0 else rows * self.embed_scale
        if self.positions is not None:
            x = x + self.positions(ids, lengths, x.dtype)
        context = Context(cu_seqlens, lengths, positions_of(lengths, ids.device), (), ids)
        for layer in self.layers:
            context = replace(context, shared=dict(context.shared))
            x = layer(x, context)
        return Source(self.norm(x), lengths)


def prompts(ids: Tensor, cu_seqlens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(ids, cu_seqlens) of what the encoder may read of documents that the decoder learns: of each the tokens up to the
    first that has a label [T], so that it sees nothing that is to be predicted; a document without one as a whole."""
    bounds = cu_seqlens.tolist()
    kept, lengths = [], [0]
    for start, stop in itertools.pairwise(bounds):
        labelled = (labels[start:stop] != NO_LOSS).nonzero()
        end = start + int(labelled[0]) + 1 if len(labelled) else stop
        kept.append(ids[start:end])
        lengths.append(end - start)
    return torch.cat(kept) if kept else ids, torch.tensor(lengths, device=cu_seqlens.device).cumsum(0)
