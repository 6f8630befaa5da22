"""Context parallelism: the tokens of a batch lie on several ranks, and blocks see across the cuts.

Softmax attention gathers keys and values (latent attention the latents), each rank for its own queries (Llama 3,
arXiv:2407.21783, section 3.3.2). Recurrences pass their state: every rank tells what its tokens do to a state, and
composes what the ranks before it told (`nn.cut.carried`). Convolutions take the last tokens of the rank before.
Documents may straddle any number of ranks.
"""

from dataclasses import replace

import torch
from torch import nn

from dayzero.runtime.errors import InputError
from dayzero.runtime.nn import CausalLM
from dayzero.runtime.nn.context import Context
from dayzero.runtime.nn.cut import Cut, cut
from dayzero.runtime.rows import Span
from dayzero.runtime.tensor_parallel import inner_parts, parts_of


def part_of(context: Context, span: Span) -> Context:
    """What this rank's tokens see of the context of a whole batch. Raises ValueError for fewer tokens than ranks."""
    made = sliced(context, span.own, cut(context.lengths, span))
    return replace(made, shared={name: value[span.own] for name, value in context.shared.items()})


def sliced(context: Context, own: slice, lengths: Cut) -> Context:
    """The context of some rows of it. What earlier layers left is of these rows already."""
    bounds = torch.tensor([0, *lengths], device=context.cu_seqlens.device).cumsum(0)
    tables = tuple((cos[own], sin[own]) for cos, sin in context.tables)
    ids = None if context.ids is None else context.ids[own]
    return replace(
        context,
        cu_seqlens=bounds,
        lengths=lengths,
        position=context.position[own],
        tables=tables,
        ids=ids,
    )


def check_context_parallel(model: CausalLM, cp: int) -> None:
    """Raises InputError for a block that mixes tokens and cannot see across ranks."""
    for path, part in parts_of(model):
        check_parts(path, part, cp)


def check_parts(path: str, whole: nn.Module, cp: int) -> None:
    """`check_context_parallel` of one part of a layer."""
    for inner, part in inner_parts(path, whole):
        if getattr(part, "uses_context", False) and not getattr(part, "context_parallel", False):
            raise InputError(
                "parallel.cp",
                found=str(cp),
                expected=f"1: {type(part).__name__} of {inner} has no form whose tokens lie on several ranks",
            )
