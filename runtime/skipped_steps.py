"""Steps whose loss or gradient is not a number: the weights stay as they are, and the batches are kept to look at."""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from dayzero.runtime.moments import local
from dayzero.runtime.packing import Batch


class Diverged(Exception):
    """The loss or the gradient is no longer a number."""

    on_all_ranks = True


class SkippedSteps:
    """Counts skipped steps in a row, and ends the run after too many."""

    def __init__(self, allowed: int):
        """allowed: in a row."""
        self.allowed, self.row = allowed, 0

    def count(self, step: int, loss: float, norm: float, skipped: bool) -> None:
        """step: the number of the step, from 1. Raises Diverged for one more than are allowed."""
        self.row = self.row + 1 if skipped else 0
        if self.row > self.allowed:
            first = step - self.row + 1
            steps = f"step {step}" if self.row == 1 else f"steps {first} to {step}"
            raise Diverged(
                f"{steps}: loss {loss}, gradient norm {norm}; the weights of step {first - 1} are unchanged, and the "
                f"batches are in the run's folder skipped/"
            )


def keep_batches(
    folder: Path, step: int, rank: int, own_loss: float, loss: float, batches: Sequence[Batch], model: nn.Module
) -> None:
    """Writes folder/step_N_rank_R.json: the token ids, labels and document bounds of this rank's batches, and the
    parameters whose gradient here is not finite. Of ranks with a finite loss of their own where another's is not,
    nothing: they are not the cause. own_loss: of this rank's batches. loss: of all."""
    if math.isfinite(own_loss) and not math.isfinite(loss):
        return
    bad = [
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is not None and not bool(torch.isfinite(local(parameter.grad)).all())
    ]
    content = {
        "step": step,
        "rank": rank,
        "loss": str(own_loss),
        "parameters": bad,
        "batches": [
            {"ids": b.ids.tolist(), "labels": b.labels.tolist(), "cu_seqlens": b.cu_seqlens.tolist()} for b in batches
        ],
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"step_{step:08d}_rank_{rank}.json").write_text(json.dumps(content) + "\n")
