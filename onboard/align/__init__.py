"""The alignment ladder: figures, thresholds and verdicts, all in one place. No repair step may edit this folder."""

from .coverage import coverage_rung
from .ladder import THRESHOLDS, Alignment, Rung, Verdict
from .model import model_rung

__all__ = ["THRESHOLDS", "Alignment", "Rung", "Verdict", "coverage_rung", "model_rung"]
