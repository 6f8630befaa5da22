"""A decoder-only language model put together from blocks."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dayzero.runtime.loss import summed_cross_entropy

from .context import Context, lengths_of, positions_of
from .rotary import Rotary


class CausalLM(nn.Module):
    """Token ids to logits, or straight to the summed loss.

    tied: the head reuses the embedding matrix; otherwise it has its own, [V, H].
    """

    def __init__(
        self,
        vocabulary: int,
        hidden: int,
        layers: Sequence[nn.Module],
        norm: nn.Module,
        rotary: Rotary | None = None,
        tied: bool = False,
    ):
        super().__init__()
        self.embed = nn.Embedding(vocabulary, hidden)
        self.layers = nn.ModuleList(layers)
        self.norm = norm
        self.rotary = rotary
        self.head = None if tied else nn.Linear(hidden, vocabulary, bias=False)

    def reset_parameters(self, std: float) -> None:
        nn.init.normal_(self.embed.weight, std=std)
        if self.head is not None:
            nn.init.normal_(self.head.weight, std=std)

    def forward(
        self, ids: Tensor, cu_seqlens: Tensor, labels: Tensor | None = None, loss_chunk: int | None = None
    ) -> Tensor:
        """ids: [T] int64, documents end to end; cu_seqlens: [documents + 1].

        Without labels: logits [T, V]. With labels [T] (-100 where no loss is wanted; already shifted: labels[t] is
        what follows ids[t]): the summed cross entropy, a float32 scalar (float64 for float64 models). loss_chunk:
        tokens whose logits exist at a time.
        """
        lengths = lengths_of(cu_seqlens, ids.shape[0])
        position = positions_of(lengths, ids.device)
        x = self.embed(ids)
        tables = (self.rotary(position, x.dtype),) if self.rotary is not None else ()
        context = Context(cu_seqlens, lengths, position, tables, ids)
        for layer in self.layers:
            x = layer(x, context)
        x = self.norm(x)
        weight = self.embed.weight if self.head is None else self.head.weight
        if labels is None:
            return F.linear(x, weight)
        return summed_cross_entropy(x, weight, labels, loss_chunk)


def initialise(model: nn.Module, std: float, seed: int) -> None:
    """Random weights for a model that starts from nothing: every block resets its own parameters."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in model.modules():
            if hasattr(module, "reset_parameters") and not isinstance(module, (nn.Linear, nn.Embedding)):
                module.reset_parameters(std)  # type: ignore[operator]
