"""The inputs that a block and its module are compared on, and what came of it.

The captured input; fresh ones of several sizes up to saturation, each on redrawn weights; and, where something is
selected, selection biases far from those of a draw. A module may give nothing finite where an input saturates it, such
as one that takes exponentials of what it reads. Nothing is compared there, and that is written down; but of every other
kind of input some must be, and every gradient somewhere.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates import Site
from dayzero.onboard.oracle.reference import never_trained

CAPTURED = "captured input"
NOTHING_FINITE = "the module itself gives no finite output for it"
_INPUT_SCALES = (0.3, 1.0, 5.0, 30.0)
_SATURATING = 1.0  # scales above this may


@dataclass
class Trial:
    """One input. kind: what inputs that differ by the weights alone have in common. weights: the rest of its name.
    gain: to redraw the weights with before, None to keep them. saturates: whether nothing of its kind need be
    compared."""

    kind: str
    hidden: Tensor
    weights: str = ""
    gain: float | None = None
    saturates: bool = False

    @property
    def name(self) -> str:
        return f"{self.kind}{self.weights}"


def trials(site: Site, generator: torch.Generator, gains: Sequence[float]) -> Iterator[Trial]:
    """The captured input first. gains: of the weights that fresh inputs are given to."""

    def drawn(scale: float = 1.0) -> Tensor:
        return torch.randn(site.call.hidden.shape, generator=generator, dtype=torch.float64) * scale

    yield Trial(CAPTURED, site.call.hidden)
    for gain in gains:
        for position, scale in enumerate((*_INPUT_SCALES, *_beyond_limits(site))):
            redrawn = gain if position == 0 else None
            yield Trial(f"input x{scale:g}", drawn(scale), f", weights x{gain:g}", redrawn, scale > _SATURATING)
    # Selection biases that rise or fall with the class: the last or the first are chosen whatever their scores are.
    for name, order in (("rising", 1.0), ("falling", -1.0)) if never_trained(site.module) else ():
        for vector in never_trained(site.module):
            ramp = torch.linspace(-order, order, vector.numel(), dtype=torch.float64)
            vector.copy_(ramp.reshape(vector.shape))
        yield Trial(f"input x1, biases {name}", drawn())
    # Biases far from zero and close together: rounded to fewer digits, as bfloat16 would, they are all the same.
    if never_trained(site.module):
        for vector in never_trained(site.module):
            ramp = 1024 + torch.linspace(-0.4, 0.4, vector.numel(), dtype=torch.float64)
            vector.copy_(ramp.reshape(vector.shape))
        yield Trial("input x1, biases close together", drawn())


def _beyond_limits(site: Site) -> list[float]:
    """Input scales at which the large limits of the trace are passed; the small ones are passed anyway."""
    if "clamp" not in site.operations.steps:
        return []
    return [3 * value for value in sorted(site.operations.constants) if 10 < value < 1e12]


@dataclass
class Compared:
    """What was compared so far. made: each trial, and the names of what was compared in it."""

    made: list[tuple[Trial, set[str]]] = field(default_factory=list)

    def add(self, trial: Trial, found: Mapping[str, float]) -> None:
        self.made.append((trial, set(found)))

    def missing(self, block: nn.Module) -> str:
        """Why this is too little for a proof; "" where it is enough."""
        needed = dict.fromkeys(trial.kind for trial, _ in self.made if not trial.saturates)
        if nothing := needed.keys() - {trial.kind for trial, found in self.made if found}:
            return f"{next(kind for kind in needed if kind in nothing)}: {NOTHING_FINITE}"
        trained = (name for name, parameter in block.named_parameters() if parameter.requires_grad)
        wanted = ["output", "input gradient", *(f"gradient of {name}" for name in trained)]
        found = set().union(*(found for _, found in self.made))
        for name in wanted:
            if name not in found:
                return f"{name}: the module's own is nowhere exact enough to be compared"
        return ""

    @property
    def skipped(self) -> str:
        """The inputs on which nothing was compared, of how many, in one line; "" for none."""
        names = [trial.name for trial, found in self.made if not found]
        return f"{len(names)} of {len(self.made)} inputs ({'; '.join(names)})" if names else ""
