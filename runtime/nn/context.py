"""What every layer of one forward pass shares: where documents begin, token positions and ids, rotary tables."""

import itertools
from collections import UserDict
from collections.abc import MutableMapping
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Source:
    """What the decoder of an encoder-decoder looks at. states: [U, H], what the encoder gives for the source of every
    document, end to end. lengths: of these, one a document of the decoder."""

    states: Tensor
    lengths: tuple[int, ...]


class Shared(UserDict[str, Tensor]):
    """What layers leave for one another, by name. No dict: what shards layers copies every dict among their arguments
    to cast what is inside, and what a layer left in a copy would be lost."""


@dataclass(frozen=True)
class Context:
    """cu_seqlens: [documents + 1] int64, 0 first and T last. lengths: the same as Python integers.
    position: [T] int64, each token's place in its own document.
    tables: (cos, sin), each [T, pairs] with every frequency once, one for each rotary embedding of the model.
    ids: [T] int64, the token ids. shared: what an earlier layer leaves for later ones, by the name that both know.
    source: of a decoder with cross attention. use: of a part that several layers share, which of them this is.
    message: of a layer that runs again, what it is handed of the pass before, [T, H] each; None in its first pass.
    """

    cu_seqlens: Tensor
    lengths: tuple[int, ...]
    position: Tensor
    tables: tuple[tuple[Tensor, Tensor], ...] = ()
    ids: Tensor | None = None
    shared: MutableMapping[str, Tensor] = field(default_factory=Shared)
    source: Source | None = None
    use: int = 0
    message: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.shared, Shared):
            object.__setattr__(self, "shared", Shared(self.shared))


def lengths_of(cu_seqlens: Tensor, tokens: int) -> tuple[int, ...]:
    """Document lengths as integers. Raises ValueError unless they cover exactly `tokens` tokens in order."""
    bounds = cu_seqlens.tolist()
    lengths = tuple(end - start for start, end in itertools.pairwise(bounds))
    if not bounds or bounds[0] != 0 or bounds[-1] != tokens or min(lengths, default=0) < 0:
        raise ValueError(
            f"cu_seqlens {bounds[:4]}...{bounds[-1:]} must rise from 0 to the {tokens} tokens of the batch"
        )
    return lengths


def positions_of(lengths: tuple[int, ...], device: torch.device) -> Tensor:
    """[T] int64: 0, 1, 2, ... restarting at every document."""
    parts = [torch.arange(length, device=device) for length in lengths]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64, device=device)
