"""Candidates for routers that are not one matrix, one score and the best K: each is known by what its trace has."""

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from dayzero.onboard.candidates.causes import changed, plain_settings
from dayzero.onboard.candidates.evidence import Candidate, Evidence, below, literal, size
from dayzero.onboard.candidates.gates import activations
from dayzero.onboard.candidates.nesting import Inner
from dayzero.onboard.candidates.router import normalise_argument, read_program, scale_argument, scored
from dayzero.onboard.oracle.calls import tensors
from dayzero.onboard.oracle.reference import state_of
from dayzero.onboard.prove.trace import Operations
from dayzero.runtime.weights import Source, Stored


def propose_odd_routers(
    inner: Inner, matrices: list[str], vectors: dict[str, int], experts: int, top_k: int | None
) -> Iterator[Candidate]:
    """inner: what executes the routing. matrices, vectors: names of tensors that may belong to it. top_k: the experts
    of a token, where they were seen."""
    state = state_of(inner.outer.module)
    for matrix in matrices:
        rows = state[matrix].shape[0]
        yield from _hashed(inner, matrix, rows, top_k)
        yield from _joint(inner, matrix, rows, vectors, experts)
        yield from _sparse_mixer(inner, matrix, rows)
        yield from _top_one(inner, matrix, rows, vectors)
        yield from _product_keys(inner, matrix, rows, experts, state)
    yield from _carried(inner, matrices, vectors)


def _hashed(inner: Inner, matrix: str, rows: int, top_k: int | None) -> Iterator[Candidate]:
    """Nothing is selected by score, and there is a table of whole numbers."""
    tables = [n for n, t in state_of(inner.outer.module).items() if not t.is_floating_point() and t.ndim == 2]
    tables = [name for name in tables if state_of(inner.outer.module)[name].shape[1] == top_k]
    if any(step.name == "topk" for step in inner.operations.sequence):
        return
    for table in tables:
        for score in scored(inner.operations.sequence, {rows}):
            arguments: dict[str, Evidence | Candidate] = {
                "hidden": size(matrix, 1),
                "experts": size(matrix, 0),
                "top_k": _size_of(table, 1),
                "vocabulary": _size_of(table, 0),
                "score": literal(score, "the trace"),
            }
            after = tuple(inner.operations.sequence)
            if (normalise := normalise_argument(inner, after, int(top_k or 0))) is not None:
                arguments["normalise"] = normalise
            if (scale := scale_argument(inner, after, int(top_k or 0))) is not None:
                arguments["scale"] = scale
            yield Candidate("HashRouter", arguments, {"weight": Stored(matrix), "table": Stored(table)})


def _size_of(buffer: str, dim: int) -> Evidence:
    owner, _, name = buffer.rpartition(".")
    return Evidence(
        f"shape of {buffer}[{dim}]",
        lambda module, config: getattr(module.get_submodule(owner), name).shape[dim],
    )


def _joint(inner: Inner, matrix: str, rows: int, vectors: dict[str, int], experts: int) -> Iterator[Candidate]:
    """More rows than experts, and logarithms of sigmoids that are normalised."""
    steps = {step.name for step in inner.operations.sequence}
    biases = [name for name, length in vectors.items() if length == experts]
    factors = [name for name, length in vectors.items() if length == 1]
    program = read_program(inner.operations, experts)
    if not {"log_sigmoid_forward", "logsumexp"} <= steps or rows <= experts or program is None:
        return
    for bias in biases:
        for factor in factors:
            arguments: dict[str, Evidence | Candidate] = {
                "hidden": size(matrix, 1),
                "experts": _size_of(bias, 0),
                "shared": Evidence(
                    f"shape of {matrix}[0] - shape of {bias}[0]",
                    lambda module, config, bias=bias: (
                        state_of(module)[matrix].shape[0] - state_of(module)[bias].shape[0]
                    ),
                ),
                "top_k": _top_k_of(inner, experts, program.top_k),
            }
            if (scale := scale_argument(inner, program.after, program.top_k + rows - experts)) is not None:
                arguments["scale"] = scale
            parameters: dict[str, Source] = {
                "weight": Stored(matrix),
                "factor": Stored(factor),
                "selection_bias": Stored(bias),
            }
            yield Candidate("JointRouter", arguments, parameters)


def _top_k_of(inner: Inner, classes: int, top_k: int) -> Evidence:
    def shows(seen: Operations, other: int) -> bool:
        found = read_program(seen, classes)
        return found is not None and found.top_k == other

    for other in (top_k + 1, top_k - 1):
        if found := inner.driver(top_k, other, lambda seen, other=other: shows(seen, other)):
            return found
    return literal(top_k, "the top-k of the trace")


def _sparse_mixer(inner: Inner, matrix: str, rows: int) -> Iterator[Candidate]:
    """Two maxima, a threshold that relative distances are compared with, and no top-k."""
    sequence = inner.operations.sequence
    thresholds = {step.numbers[-1] for step in sequence if step.name == "gt" and step.numbers}
    if any(step.name == "topk" for step in sequence) or len(thresholds) != 1:
        return
    jitter = thresholds.pop() / 2
    found = inner.driver(jitter, 3 * jitter, lambda seen: any(abs(c - 6 * jitter) < 1e-12 for c in seen.constants))
    arguments: dict[str, Evidence | Candidate] = {
        "hidden": size(matrix, 1),
        "experts": size(matrix, 0),
        "jitter": found or literal(jitter, "half of the trace's threshold"),
    }
    yield Candidate("SparseMixerRouter", arguments, {"weight": Stored(matrix)})


def _top_one(inner: Inner, matrix: str, rows: int, vectors: dict[str, int]) -> Iterator[Candidate]:
    """A maximum of a softmax, and no top-k; the capacity is a whole number that changes the output when it is 0."""
    sequence = inner.operations.sequence
    names = {step.name for step in sequence}
    if "topk" in names or not {"max", "_softmax"} <= names:
        return
    bias = [name for name, length in vectors.items() if length == rows]
    for capacity in _capacities(inner):
        arguments: dict[str, Evidence | Candidate] = {
            "hidden": size(matrix, 1),
            "experts": Evidence(
                f"shape of {matrix}[0] + 1", lambda module, config: module.get_parameter(matrix).shape[0] + 1
            ),
            "capacity": capacity,
            "logit_bias": literal(bool(bias), "the router's parameters"),
        }
        parameters: dict[str, Source] = {"weight": Stored(matrix)}
        yield Candidate("TopOneRouter", arguments, parameters | ({"logit_bias": Stored(bias[0])} if bias else {}))


def _capacities(inner: Inner) -> Iterator[Evidence]:
    """Whole numbers of the router whose change to 0 changes what it gives, though no scalar of the trace shows them."""
    call = inner.site.call
    with torch.no_grad():
        usual = tensors(call.replay_exactly(call.args, call.kwargs))
        for evidence, holder, name, held in plain_settings(inner.site):
            if type(held) is not int or held < 1:
                continue
            with changed(holder, name, 0):
                try:
                    other = tensors(call.replay_exactly(call.args, call.kwargs))
                except Exception:  # the reference's own code refuses the value, in whatever way
                    continue
            if any(a.shape == b.shape and not torch.equal(a, b) for a, b in zip(usual, other, strict=False)):
                yield below(inner.path, evidence)


def _product_keys(
    inner: Inner, matrix: str, rows: int, experts: int, state: Mapping[str, torch.Tensor]
) -> Iterator[Candidate]:
    """Twice as many rows as the square root of the experts, rounded down."""
    counted = [name for name, held in state.items() if held.ndim >= 2 and held.shape[0] == experts]
    if rows != 2 * math.isqrt(experts) or not counted:
        return
    arguments: dict[str, Evidence | Candidate] = {"hidden": size(matrix, 1), "experts": size(counted[0], 0)}
    classes = (rows // 2) ** 2
    program = read_program(inner.operations, classes)
    if program is None:
        return
    arguments["top_k"] = _top_k_of(inner, classes, program.top_k)
    if (normalise := normalise_argument(inner, program.after, program.top_k)) is not None:
        arguments["normalise"] = normalise
    yield Candidate("ProductKeyRouter", arguments, {"weight": Stored(matrix)})


def _carried(inner: Inner, matrices: list[str], vectors: dict[str, int]) -> Iterator[Candidate]:
    """Four projections one after the other, a norm among them, perhaps the state of an earlier router."""
    linears = [
        (path, call)
        for path, call in inner.site.inner.items()
        if isinstance(call.module, nn.Linear) and call.has_stream
    ]
    shapes = [tuple(call.module.get_parameter("weight").shape) for _, call in linears]
    if len(linears) != 4 or not (shapes[0][0] == shapes[1][0] == shapes[1][1] == shapes[2][0] == shapes[3][1]):
        return
    width, classes = shapes[0][0], shapes[3][0]
    program = read_program(inner.operations, classes)
    prefix = f"{inner.path}." if inner.path else ""
    bias = [name for name, length in vectors.items() if length == classes]
    eps = [step.numbers[-1] for step in inner.operations.sequence if step.name == "add" and step.numbers]
    own = [n for n, length in vectors.items() if length == width and not n.endswith("bias")]
    if program is None or len(bias) != 1 or not eps or len(own) not in {1, 2}:
        return
    parameters: dict[str, Source] = {"selection_bias": Stored(bias[0])}
    for name, (path, call) in zip(("down", "first", "second", "out"), linears, strict=True):
        parameters[f"{name}.weight"] = Stored(f"{prefix}{path}.weight")
        if call.module.bias is not None:
            parameters[f"{name}.bias"] = Stored(f"{prefix}{path}.bias")
    down = f"{prefix}{linears[0][0]}.weight"
    for norm in own:
        carry = [name for name in own if name != norm]
        for act in activations(inner.operations):
            arguments: dict[str, Evidence | Candidate] = {
                "hidden": size(down, 1),
                "experts": size(f"{prefix}{linears[3][0]}.weight", 0),
                "top_k": _top_k_of(inner, classes, program.top_k),
                "width": size(down, 0),
                "eps": inner.cause(eps[0]),
                "act": literal(act, "the trace's activation"),
                "carried": literal(bool(carry), "the router's parameters"),
            }
            extra: dict[str, Source] = {"norm.weight": Stored(norm), **({"carry": Stored(carry[0])} if carry else {})}
            yield Candidate("CarriedRouter", arguments, {**parameters, **extra})
