"""Which rows of which projection a block's own projection is, where a reference keeps several side by side."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal, present, size
from dayzero.onboard.candidates.feed_forward import linear_calls
from dayzero.runtime.weights import Part, Source, Squeeze, Stored


@dataclass(frozen=True)
class Projection:
    """A matrix on the module's input, or two after each other. paths: of the linears, the one on the input first.
    result: [T, rows]. order: its place in the order of execution. bias: whether the last one has one."""

    paths: tuple[str, ...]
    result: Tensor
    order: int
    bias: bool

    @property
    def rows(self) -> int:
        return self.result.shape[-1]


@dataclass(frozen=True)
class Share:
    """Rows start .. stop-1 of each of `groups` blocks of a projection."""

    projection: Projection
    start: int
    stop: int
    groups: int = 1

    @property
    def whole(self) -> bool:
        return (self.start, self.stop, self.groups) == (0, self.projection.rows, 1)

    @property
    def label(self) -> str:
        return self.projection.paths[-1] if self.whole else f"a part of {self.projection.paths[-1]}"

    @property
    def place(self) -> tuple[int, int]:
        """Sorts shares as their values stand side by side."""
        return (self.projection.order, self.start)

    def values(self) -> Tensor:
        """What the reference computed: [T, groups * (stop - start)]."""
        return self.projection.result.unflatten(-1, (self.groups, -1))[..., self.start : self.stop].flatten(-2)

    def count(self, module: nn.Module) -> int:
        """Its number of rows in this module."""
        if self.whole:
            return module.get_parameter(f"{self.projection.paths[-1]}.weight").shape[0]
        return self.groups * (self.stop - self.start)

    def rank(self) -> Evidence:
        """The number of values between the two matrices, None for one matrix."""
        if len(self.projection.paths) == 1:
            return literal(None, "one matrix")
        return size(f"{self.projection.paths[0]}.weight", 0)

    def parameters(self, name: str) -> dict[str, Source]:
        """The parameters of a block's projection `name`."""
        if len(self.projection.paths) == 2:
            down, up = self.projection.paths
            found: dict[str, Source] = {
                f"{name}.down.weight": Stored(f"{down}.weight"),
                f"{name}.up.weight": self._rows(f"{up}.weight"),
            }
            return found | ({f"{name}.up.bias": self._rows(f"{up}.bias")} if self.projection.bias else {})
        path = self.projection.paths[0]
        kinds = ("weight", "bias") if self.projection.bias else ("weight",)
        return {f"{name}.{kind}": self._rows(f"{path}.{kind}") for kind in kinds}

    def _rows(self, stored: str) -> Source:
        return Stored(stored) if self.whole else Part(0, self.start, self.stop, Stored(stored), self.groups)


def propose_projection(site: Site) -> list[Candidate]:
    """A matrix that is a part of a layer by itself."""
    if type(site.module) is not nn.Linear:
        return []
    biased = site.module.bias is not None
    arguments = {"hidden": size("weight", 1), "out": size("weight", 0), "bias": present("bias")}
    kinds = ("weight", "bias") if biased else ("weight",)
    return [Candidate("Projection", arguments, {f"linear.{kind}": Stored(kind) for kind in kinds})]


def equal_values(a: Tensor, b: Tensor) -> bool:
    """The same numbers in the same order, whatever the shapes."""
    return a is b or (a.numel() == b.numel() and torch.equal(a.reshape(-1), b.reshape(-1)))


def input_projections(site: Site, hidden: Tensor | None = None) -> list[Projection]:
    """The linears that are fed the module's input, each with the one behind it that is fed its result, if any.

    hidden: what else they may be fed.
    """
    hidden = site.call.hidden if hidden is None else hidden
    linears = linear_calls(site)
    found = []
    for order, (path, call) in enumerate(linears.items()):
        if not equal_values(call.hidden, hidden):
            continue
        behind = [p for p, c in linears.items() if p != path and equal_values(c.hidden, call.result)]
        last = behind[0] if len(behind) == 1 else path
        biased = linears[last].module.bias is not None
        paths = (path,) if last == path else (path, last)
        found.append(Projection(paths, linears[last].result.flatten(0, -2), order, biased))
    return found


def shares(
    projections: Sequence[Projection], rows: Mapping[str, int], side_by_side: Sequence[Sequence[str]], groups: int = 1
) -> Iterator[dict[str, Share]]:
    """Every way in which the roles of `rows` (role -> rows) are all rows of all projections.

    side_by_side: orders in which roles may share a projection, plainly or within each of `groups` blocks of it.
    """
    if not projections:
        if not rows:
            yield {}
        return
    first, rest = projections[0], projections[1:]
    for roles in [*((role,) for role in rows), *side_by_side]:
        if not all(role in rows for role in roles) or sum(rows[role] for role in roles) != first.rows:
            continue
        left = {role: number for role, number in rows.items() if role not in roles}
        for blocks in (1,) if len(roles) == 1 or groups == 1 else (1, groups):
            if any(rows[role] % blocks for role in roles):
                continue
            mine, start = {}, 0
            for role in roles:
                mine[role] = Share(first, start, start + rows[role] // blocks, blocks)
                start += rows[role] // blocks
            for others in shares(rest, left, side_by_side, groups):
                yield mine | others


def rows_per(site: Site, share: Share, each: Evidence, what: str) -> Evidence:
    """How many times `each` goes into the rows of a share. Of a share that is only a part of a projection the shapes of
    another model do not tell; there a number of the module or of the config says so, where one does."""
    quotient = Evidence(
        f"rows of {share.label} / {what}",
        lambda module, config: share.count(module) // each.resolve(module, config),
    )
    if share.whole:
        return quotient
    return (site.explain(quotient.resolve(site.module, site.config)) or [quotient])[0]


def depthwise(site: Site) -> list[tuple[str, int]]:
    """(name, channels) of the weights of depthwise convolutions, [C, 1, W]."""
    return [
        (name, parameter.shape[0])
        for name, parameter in site.module.named_parameters()
        if parameter.ndim == 3 and parameter.shape[1] == 1 and parameter.shape[2] > 1
    ]


def vector(site: Site, name: str) -> Source:
    """The parameter as a vector, without its dimensions of one element."""
    shape = site.module.get_parameter(name).shape
    ones = [dim for dim, length in enumerate(shape) if length == 1]
    extra = tuple(ones[: len(shape) - 1])
    return Squeeze(extra, Stored(name)) if extra else Stored(name)


def count(name: str) -> Evidence:
    """The number of elements of a parameter."""
    return Evidence(f"elements of {name}", lambda module, config: module.get_parameter(name).numel())


def split_convolutions(
    site: Site, convolutions: Sequence[tuple[str, int]], shared: Mapping[str, Share], rows: Mapping[str, int]
) -> tuple[dict[str, Source], Evidence]:
    """The convolution of each role of `shared`, and whether it has a bias: each of its own, or channels of one
    convolution in the order in which the projections stand. {} where they do not fit."""
    roles = sorted(shared, key=lambda role: shared[role].place)
    biases = [name.removesuffix("weight") + "bias" for name, _ in convolutions]
    present = {name for name, _ in site.module.named_parameters()}
    biased = all(name in present for name in biases)
    conv_bias = literal(biased, "the convolution's parameters")
    found: dict[str, Source] = {}
    if len(convolutions) == len(roles):
        for role, (name, channels), bias in zip(roles, convolutions, biases, strict=True):
            if channels != rows[role]:
                return {}, conv_bias
            found[f"{role}_conv.weight"] = Squeeze((1,), Stored(name))
            found |= {f"{role}_conv.bias": Stored(bias)} if biased else {}
    elif len(convolutions) == 1:
        start = 0
        for role in roles:
            stop = start + rows[role]
            found[f"{role}_conv.weight"] = Part(0, start, stop, Squeeze((1,), Stored(convolutions[0][0])))
            found |= {f"{role}_conv.bias": Part(0, start, stop, Stored(biases[0]))} if biased else {}
            start = stop
    return found, conv_bias
