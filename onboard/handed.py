"""What a reference module is handed beside its hidden input, as the context that our blocks read."""

import torch
from torch import Tensor

from dayzero.onboard.discover import Call
from dayzero.runtime.nn import Context
from dayzero.runtime.nn.context import lengths_of, positions_of

__all__ = ["context_of", "rotary_tables"]


def context_of(call: Call) -> Context:
    """The context of a call on a batch [B, S, H]: every row a document of its own."""
    batch, length = call.hidden.shape[:2] if call.hidden.ndim > 2 else (1, call.hidden.shape[0])
    bounds = torch.arange(0, batch * length + 1, length)
    lengths = lengths_of(bounds, batch * length)
    return Context(bounds, lengths, positions_of(lengths, bounds.device), rotary_tables(call))


def rotary_tables(call: Call) -> tuple[tuple[Tensor, Tensor], ...]:
    """Every (cos, sin) pair among the arguments, each table [T, D]."""
    batch = call.hidden.shape[0]
    pairs = [value for value in [*call.args, *call.kwargs.values()] if isinstance(value, tuple) and len(value) == 2]
    pairs = [pair for pair in pairs if all(isinstance(table, Tensor) and table.ndim == 3 for table in pair)]
    return tuple(
        (cos.expand(batch, -1, -1).flatten(0, 1), sin.expand(batch, -1, -1).flatten(0, 1)) for cos, sin in pairs
    )
