"""Rungs, thresholds, verdicts."""

import math
from typing import Literal

from pydantic import Field

from dayzero.runtime.spec import Record

Verdict = Literal["PASS", "WARN", "FAIL", "UNVERIFIED"]

# Relative errors, ||ours - reference|| / ||reference||.
THRESHOLDS = {
    "L0": 0.0,
    "L1": 1e-9,
    "L2": 1e-8,
    "L2 float32": 1e-4,
}
TITLES = {
    "L0": "coverage: every tensor in and out again, bit for bit",
    "L1": "blocks: outputs and gradients, float64",
    "L2": "model: logits, loss and every gradient, float64 and float32",
}


class Rung(Record):
    """worst: the largest error of the rung; where: what it belongs to. details: one line a comparison."""

    verdict: Verdict
    worst: float
    threshold: float
    where: str
    details: list[str] = Field(default_factory=list)


class Float32(Record):
    """What a module of the reference computes in float32 when it runs in bfloat16, and the block that stands for it.
    casts: to float32, in one pass. steps: arithmetic that is all in float32. narrow: those of them that the block runs
    in bfloat16."""

    module: str
    block: str
    casts: int
    steps: list[str]
    narrow: list[str] = Field(default_factory=list)


class Alignment(Record):
    """blocks: number of distinct blocks by status. float32: what a run in bfloat16 computes in float32, by module.
    hashes: parameter -> content hash of the weights, None where no rung read them."""

    rungs: dict[str, Rung] = Field(default_factory=dict)
    blocks: dict[str, int] = Field(default_factory=dict)
    float32: list[Float32] = Field(default_factory=list)
    hashes: dict[str, str] | None = None

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the rungs that ran; UNVERIFIED where none did."""
        found = {rung.verdict for rung in self.rungs.values()}
        order: tuple[Verdict, ...] = ("FAIL", "UNVERIFIED", "WARN", "PASS")
        for verdict in order:
            if verdict in found:
                return verdict
        return "UNVERIFIED"

    def bounded(self) -> "Alignment":
        """The same with every error rounded up to a power of ten: what is written down, equal on every machine."""
        rungs = {
            name: rung.model_copy(update={"worst": rounded_up(rung.worst), "details": []})
            for name, rung in self.rungs.items()
        }
        return self.model_copy(update={"rungs": rungs})


def judge(errors: dict[str, float], threshold: float) -> Rung:
    """A rung from named errors. NaN and nothing at all never pass."""
    if not errors:
        return not_compared("nothing was compared", threshold)
    where = max(errors, key=lambda name: (not math.isfinite(errors[name]), errors[name]))
    worst = errors[where] if math.isfinite(errors[where]) else math.inf
    details = [f"{name}: {error:.2e}" for name, error in errors.items()]
    verdict: Verdict = "PASS" if worst <= threshold else "FAIL"
    return Rung(verdict=verdict, worst=worst, threshold=threshold, where=where, details=details)


def not_compared(why: str, threshold: float) -> Rung:
    """A rung that has nothing to stand on."""
    return Rung(verdict="UNVERIFIED", worst=math.inf, threshold=threshold, where=why)


def rounded_up(error: float) -> float:
    """The next power of ten, at least 1e-12; 0 stays 0. An upper bound that does not change with the processor."""
    if error == 0 or not math.isfinite(error):
        return error
    return float(f"1e{max(math.ceil(math.log10(error)), -12)}")
