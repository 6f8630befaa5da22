"""What a layer is taken apart into: its units, what each reads, and what the layer gives."""

from dataclasses import dataclass, field

from dayzero.onboard.oracle.calls import Call


@dataclass
class Unit:
    """A part of a layer. path: relative to the layer. role: "norm", "mixer", "ffn", "join" for one that joins several
    values without mixing tokens, "cross" for one whose tokens look at an encoder's states, "projection" for a matrix by
    itself, "routing" for a router whose experts are a part of their own, "scale" for a parameter of the layer that
    multiplies what it reads, or "beside" for several values as one wider one. reads: earlier value ("x" is the layer's
    input, "past.0" the first that was kept) -> factor.

    more: what it reads beside that, for a part with several inputs. outputs: how many values it gives. call: the unit
    as a function of all that it reads, where that is more than its call's hidden input. after: parts that leave
    something for it. classes: of a router.
    """

    name: str
    path: str
    role: str
    reads: dict[str, float]
    more: list[dict[str, float]] = field(default_factory=list)
    outputs: int = 1
    call: Call | None = field(default=None, repr=False, compare=False)
    after: tuple[str, ...] = ()
    classes: int = 0

    @property
    def inputs(self) -> list[dict[str, float]]:
        """All sums that it reads."""
        return [self.reads, *self.more]

    @property
    def is_module(self) -> bool:
        """Whether it is a module of the reference, at its path."""
        return self.role not in {"scale", "beside", "chain"}


@dataclass
class LayerParts:
    """The units of a layer in the order in which they ran, and the sum that the layer gives. keeps: the sum that later
    layers find in what was kept, None for none."""

    units: list[Unit]
    gives: dict[str, float]
    keeps: dict[str, float] | None = None
