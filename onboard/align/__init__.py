"""The alignment ladder: figures, thresholds and verdicts, all in one place. No repair step may edit this folder."""

from dayzero.onboard.align.blocks import blocks_rung
from dayzero.onboard.align.coverage import coverage_rung
from dayzero.onboard.align.ladder import THRESHOLDS, Alignment, Rung, Verdict
from dayzero.onboard.align.model import model_rung

__all__ = ["THRESHOLDS", "Alignment", "Rung", "Verdict", "blocks_rung", "coverage_rung", "model_rung"]
