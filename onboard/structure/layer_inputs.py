"""What makes an input of its own for every layer: found by its values, like all that belongs to the model."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, below, size
from dayzero.onboard.candidates.factor import explain_factor
from dayzero.onboard.oracle.calls import Call, floats, same
from dayzero.onboard.oracle.reference import state_of
from dayzero.onboard.prove.block import relative_error
from dayzero.onboard.structure.sums import solve
from dayzero.runtime.weights import Stored

_EXACT = 1e-12  # relative


def find_layer_inputs(
    calls: Mapping[str, Call],
    layers: str,
    ids: Tensor,
    config: Any,
    norm_at: Callable[[str], Candidate | None],
) -> Candidate | None:
    """A claim about the module that holds the layers: what it hands to each of them beside the stream is made of a
    table that is fed the ids [B, S], and of a normed projection of the embeddings. None where it is not.

    norm_at: what is proven for the norm at a path.
    """
    owner = layers.rpartition(".")[0]
    inputs = handed_to_layers(calls, layers)
    first = calls[f"{layers}.0"].hidden
    if inputs is None:
        return None
    for made in _pieces(calls, inputs, first, ids):
        terms = solve(inputs, {"rows": made.rows, "projected": calls[made.norm].result})
        norm = norm_at(made.norm)
        if len(terms) != 2 or norm is None:
            continue
        module = calls[owner].module
        inside = {name: path.removeprefix(f"{owner}.") for name, path in vars(made).items() if isinstance(path, str)}
        table = below(inside["table"], explain_factor(made.factor, calls[made.table].module, config))
        share = explain_factor(terms["rows"] / terms["projected"], module, config)
        candidate = Candidate(
            "LayerInputs",
            {
                "vocabulary": size(f"{inside['table']}.weight", 0),
                "hidden": size(f"{inside['projection']}.weight", 1),
                "layers": _count(layers.removeprefix(f"{owner}.")),
                "width": _width(f"{inside['table']}.weight", layers.removeprefix(f"{owner}.")),
                "norm": norm.below(inside["norm"]),
                "embed_scale": table if terms["rows"] == terms["projected"] else _product(table, share),
                "projection_scale": explain_factor(made.before, module, config),
                "scale": explain_factor(terms["projected"], module, config),
            },
            {"embed.weight": Stored(f"{inside['table']}.weight"),
             "projection.weight": Stored(f"{inside['projection']}.weight")},
        )  # fmt: skip
        if _gives(candidate, module, config, first, ids, inputs):
            return candidate
    return None


def handed_to_layers(calls: Mapping[str, Call], layers: str) -> Tensor | None:
    """[B, S, layers, P]: the narrower value that each layer is handed beside the stream; None where one is not."""
    found = []
    for number in range(len(calls)):
        if (call := calls.get(f"{layers}.{number}")) is None:
            break
        held = [value for value in [*call.args, *call.kwargs.values()] if isinstance(value, Tensor)]
        shape = call.hidden.shape
        narrow = [value for value in floats(held) if value.shape[:-1] == shape[:-1] and value.shape[-1] < shape[-1]]
        if len(narrow) != 1:
            return None
        found += narrow
    return torch.stack(found, 2) if found and len({value.shape for value in found}) == 1 else None


@dataclass
class _Pieces:
    """table, projection, norm: their paths. rows: of the table for the ids, as it gives them, `factor` times what it
    holds. before: the factor between projection and norm."""

    table: str
    projection: str
    norm: str
    rows: Tensor
    factor: float
    before: float


def _pieces(calls: Mapping[str, Call], inputs: Tensor, first: Tensor, ids: Tensor) -> Iterator[_Pieces]:
    """Modules that give as many values as all layers are handed."""
    like = {path: call for path, call in calls.items() if floats(call.output) and _numel(call) == inputs.numel()}
    tables = [path for path, call in like.items() if isinstance(call.module, nn.Embedding)]
    linears = [path for path, call in like.items() if type(call.module) is nn.Linear and same(call.hidden, first)]
    norms = [path for path, call in like.items() if call.has_stream and call.result.shape == inputs.shape]
    for table in tables:
        made = nn.functional.embedding(ids, calls[table].module.weight.detach())  # type: ignore[arg-type, union-attr]
        factor = solve(calls[table].result, {"rows": made}) if made.numel() == inputs.numel() else {}
        for projection in linears if factor else ():
            for norm in norms:
                before = solve(calls[norm].hidden, {"projected": calls[projection].result})
                if before:
                    rows = calls[table].result.reshape(inputs.shape)
                    yield _Pieces(table, projection, norm, rows, factor["rows"], before["projected"])


def _numel(call: Call) -> int:
    return floats(call.output)[0].numel()


def _count(layers: str) -> Evidence:
    return Evidence(f"members of {layers}", lambda module, config: len(module.get_submodule(layers)))  # type: ignore[arg-type]


def _width(table: str, layers: str) -> Evidence:
    return Evidence(
        f"shape of {table}[1] / members of {layers}",
        lambda module, config: module.get_parameter(table).shape[1] // len(module.get_submodule(layers)),  # type: ignore[arg-type]
    )


def _product(one: Evidence, other: Evidence) -> Evidence:
    return Evidence(
        f"{one.label} * {other.label}",
        lambda module, config: one.resolve(module, config) * other.resolve(module, config),
    )


def _gives(candidate: Candidate, module: nn.Module, config: Any, first: Tensor, ids: Tensor, inputs: Tensor) -> bool:
    """Whether the block, with the module's weights, makes these inputs."""
    block = candidate.build(module, config).to(torch.float64)
    block.load_state_dict(candidate.values(state_of(module)))
    with torch.no_grad():
        made = block(first.flatten(0, 1), ids.flatten())
    return relative_error(made, inputs.flatten(0, 1)) <= _EXACT
