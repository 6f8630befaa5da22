"""The learning rate of each step."""

import math


def learning_rate(step: int, *, steps: int, peak: float, warmup: int, floor: float) -> float:
    """Linear warmup, then half a cosine down to `floor` times the peak (Loshchilov and Hutter 2017, arXiv:1608.03983).

    step: 0 .. steps-1. Step 0 already moves: it gets peak / (warmup + 1); the last gets floor * peak.
    """
    if step < warmup:
        return peak * (step + 1) / (warmup + 1)
    progress = (step - warmup) / max(1, steps - 1 - warmup)
    return peak * (floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress))))
