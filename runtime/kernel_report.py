"""Which backend each operator's call would go to on this machine, and why the others would not serve it."""

from collections.abc import Callable
from typing import Any

import torch
from rich.table import Table
from torch import Tensor

import dayzero.kernels  # noqa: F401  registers the operators
from dayzero.kernels.registry import choices, operators
from dayzero.runtime.processes import device_type

TOKENS, HIDDEN, WIDTH, EXPERTS = 128, 64, 32, 4


def _tensor(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.bfloat16, device=device_type(), requires_grad=True)


def _counts() -> Tensor:
    return torch.full((EXPERTS,), TOKENS // EXPERTS, device=device_type())


# Arguments of a typical call in training: bfloat16, with gradients.
CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "grouped_gemm": lambda: (_tensor(TOKENS, HIDDEN), _tensor(EXPERTS, WIDTH, HIDDEN), _counts()),
    "rms_norm": lambda: (_tensor(TOKENS, HIDDEN), _tensor(HIDDEN), 1e-6),
    "swiglu": lambda: (_tensor(TOKENS, WIDTH), _tensor(TOKENS, WIDTH)),
}


def report() -> list[dict[str, Any]]:
    """One record for every backend of every operator: operator, backend, chosen, ok, reason."""
    return [
        {"operator": name, "backend": each.backend, "chosen": each.chosen, "ok": each.ok, "reason": each.reason}
        for name in operators()
        for each in choices(name, *CALLS[name]())
    ]


def table(rows: list[dict[str, Any]]) -> Table:
    """The report for a terminal."""
    shown = Table("operator", "backend", "", "reason", title=f"bfloat16 training call on {device_type()}")
    for row in rows:
        mark = "chosen" if row["chosen"] else "available" if row["ok"] else "no"
        shown.add_row(row["operator"], row["backend"], mark, row["reason"])
    return shown
