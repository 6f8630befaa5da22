"""A router that no router of ours stands for: the reference's own code, before experts that are ours."""

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from .context import Context, positions_of
from .lifted import Lifted
from .router import Routing


class LiftedRouter(Routing):
    """x: [T, H] -> weights [T, K] in float32 at least and expert index [T, K], computed by a class of the reference.

    experts: the classes that it chooses from. weights, index: the paths of the two in what the class returns. The other
    arguments are those of `Lifted`.
    """

    uses_context = True
    holds_lifted = True
    parallel_roles: dict[str, str] = {}  # noqa: RUF012

    def __init__(
        self,
        module: type[nn.Module] | str,
        settings: dict[str, Any],
        handed: dict[str, Any],
        experts: int,
        top_k: int,
        weights: list[int],
        index: list[int],
        tables: list[int] | None = None,
        together: bool = False,
        flat: bool = False,
    ):
        super().__init__()
        self.experts, self.top_k = experts, top_k
        leaves = {"weights": weights, "index": index}
        self.code = Lifted(module, settings, handed, tables, together, flat, leaves=leaves)

    def forward(self, x: Tensor, context: Context | None = None) -> tuple[Tensor, Tensor]:
        if context is None:
            lengths = (x.shape[0],)
            bounds = torch.tensor([0, x.shape[0]], device=x.device)
            context = Context(bounds, lengths, positions_of(lengths, x.device))
        inner = replace(context, shared=dict(context.shared))
        self.code(x, inner)
        weights, index = inner.shared["weights"], inner.shared["index"]
        return weights.to(torch.promote_types(weights.dtype, torch.float32)), index
