"""Why the reference's own code stands for a module: what the search tried, and where the nearest of it missed."""

from collections.abc import Sequence

from dayzero.onboard.candidates import propose
from dayzero.onboard.candidates.evidence import Site
from dayzero.onboard.candidates.stops import few
from dayzero.onboard.prove.block import Attempt, operations_apart
from dayzero.onboard.prove.trace import Operations, trace

# What nearly every layer runs, and what only moves numbers: neither tells one layer from another.
_USUAL = {
    "mm", "bmm", "addmm", "baddbmm", "add", "sub", "rsub", "mul", "div", "neg", "sum", "mean", "pow", "sqrt", "rsqrt",
    "reciprocal", "square", "softmax", "native_layer_norm", "eq", "ne", "gt", "ge", "lt", "le", "where", "masked_fill",
    "logical_and", "logical_not", "bitwise_and", "bitwise_not", "scalar_tensor", "lift_fresh", "detach", "alias",
    "clone", "copy", "cat", "stack", "to_copy", "to", "view", "unsafe_view", "reshape_alias", "expand", "t",
    "transpose", "permute", "slice", "select", "split", "split_with_sizes", "unbind", "squeeze", "unsqueeze",
    "new_empty", "new_zeros", "new_ones", "new_full", "zeros_like", "ones_like", "empty_like", "full_like", "zero",
    "fill", "index", "index_put", "index_add", "index_select", "view_as_real", "view_as_complex", "constant_pad_nd",
    "slice_scatter", "select_scatter", "slice_backward", "select_backward",
}  # fmt: skip
_LONGEST = 400  # characters of a reason: a line of a report
_OPERATIONS = 8  # named in one reason


def reason(site: Site, roles: Sequence[str], attempts: Sequence[Attempt], inputs: int = 1) -> str:
    """One line: the candidate that came nearest and its miss; else the block that it is like and what of the module
    has no explanation; else what the module has and runs. attempts: those with blocks, for the roles. inputs: how many
    values of the layer it reads; where they are several, what it would be if it read the first is looked at too.

    A candidate whose output is no nearer than zeros would be says nothing.
    """
    near = sorted((a for a in attempts if a.error < 1.0 or a.thorough), key=lambda a: (not a.thorough, a.error))
    if near:
        said = f"nearest block {near[0].candidate.block}: {near[0].objection}"
        apart = [] if near[0].thorough else operations_apart(near[0].candidate, site)
        for side in ("reference", "block"):
            if only := [line.removeprefix(f"{side} only: ") for line in apart if line.startswith(side)]:
                said += f"; the {side} also has {', '.join(only)}"
        return _short(said)
    listening = Site(site.call, site.inner, site.config, stops=[])
    for role in dict.fromkeys("mixer" if role == "mixer of several" else role for role in roles):
        propose(role, listening)
    several = [f"reads {inputs} values of the layer"] if inputs > 1 else []
    stops = sorted(listening.stops or [], key=lambda stop: len(stop.open))
    if stops:
        return _short("; ".join([stops[0].text, *several, *_runs(_operations(site, stops[0].path))]))
    names = [name for name, _ in site.module.named_parameters()]
    said = f"no block has parameters as {few(names)}" if names else "no block is like it"
    return _short("; ".join([said, *several, *_runs(site.operations), *_reads(site)]))


def _operations(site: Site, path: str) -> Operations:
    """Those of the module at `path` inside; of the whole one where there is none."""
    call = site.inner.get(path)
    return site.operations if call is None else trace(lambda: call.replay_exactly(call.args, call.kwargs))


def _runs(operations: Operations) -> list[str]:
    """The operators that are not everybody's, in the order in which they run."""
    names = dict.fromkeys(step.name.strip("_") for step in operations.sequence)
    found = [name for name in names if name not in _USUAL]
    return [f"runs {', '.join(found[:_OPERATIONS])}"] if found else []


def _reads(site: Site) -> list[str]:
    """What it is handed beside the stream that a block of a layer seldom is."""
    return ["reads the ids of tokens"] if site.context.ids is not None else []


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 4].rsplit(" ", 1)[0] + " ..."
