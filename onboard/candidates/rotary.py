"""Candidates for the rotary tables, which belong to the model: layers are handed them.

`propose_rotaries` finds every table that any module of the reference makes or is handed, and the formula of each. Which
of a model's tables a layer rotates by is settled by `handed_tables`: the same tensors, in the order of
`Context.tables` of that layer alone.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, literal, present
from dayzero.onboard.candidates.settings import Path, at, fields_of, number, setting, walk
from dayzero.onboard.config_fields import size_of
from dayzero.onboard.oracle.calls import Call, tensors
from dayzero.onboard.oracle.reference import state_of
from dayzero.onboard.structure.handed import Table, tables_in
from dayzero.runtime.nn import Rotary
from dayzero.runtime.weights import Stored

TOLERANCE = 1e-12
_OFFSETS = (0, 1009, 20011)  # added to the positions: what a scaling does far away shows only there
_TRAINED = 1e-9  # relative, of tables and gradients at other values of what is trained


@dataclass(eq=False)
class ProposedRotary:
    """A formula and the captured tables that it gives.

    candidate: resolve it with the module at `path` ("" for none: then the evidence reads the config only).
    tables: every equal one; compare with `handed_tables` of a layer by `Table.is_made_of` or `Table.equals`.
    """

    candidate: Candidate
    path: str
    tables: list[Table]

    def gives(self, table: Table) -> bool:
        return any(table.equals(own) for own in self.tables)


@dataclass
class _Seen:
    """One table with the call that made it, and what this call gives on moved positions (None: cannot be asked).
    index: which of the call's tables it is."""

    table: Table
    call: Call | None
    position: Tensor  # [T]
    moved: list[tuple[Tensor, Table]]
    index: int = 0


def propose_rotaries(calls: Mapping[str, Call], config: Any) -> tuple[list[ProposedRotary], list[str]]:
    """A formula for every distinct table of one forward pass, and the paths of modules whose table none here gives.

    Tables that no module makes, but some module is handed, are explained on the positions of the pass alone.
    """
    found: list[ProposedRotary] = []
    open_paths: list[str] = []
    for seen in _made(calls):
        if (known := next((item for item in found if item.gives(seen.table)), None)) is not None:
            known.tables.append(seen.table)
            continue
        candidate = _formula(seen, config)
        path = seen.call.path if seen.call is not None else ""
        if candidate is None:
            open_paths.append(path)
        else:
            found.append(ProposedRotary(candidate, path, [seen.table]))
    for path, call in calls.items():
        for seen in _handed_only(call):
            if any(item.gives(seen.table) for item in found):
                continue
            candidate = _formula(seen, config)
            if candidate is not None:
                found.append(ProposedRotary(candidate, "", [seen.table]))
            elif not any(path.startswith(other + ".") for other in calls if other in open_paths):
                open_paths.append(path)
    return found, list(dict.fromkeys(open_paths))


def _made(calls: Mapping[str, Call]) -> Iterator[_Seen]:
    """The tables that modules make from positions, each with the innermost call that made it."""
    known: list[Table] = []
    for first in calls.values():
        for call in (first, *first.later):
            position = _positions(call)
            if position is None or not isinstance(call.output, (tuple, list, dict, Tensor)):
                continue
            batch, length = position.shape
            for index, table in enumerate(tables_in(call.output, batch, length)):
                if any(table.is_made_of(other.given) for other in known):
                    continue
                known.append(table)
                yield _Seen(table, call, position.flatten(), list(_moved(call, position, index)), index)


def _moved(call: Call, position: Tensor, index: int) -> Iterator[tuple[Tensor, Table]]:
    """What the call gives for positions far away, and at last again for its own: some tables remember a length."""
    for offset in (*_OFFSETS, 0):
        replaced = {id(value): value + offset for value in tensors((call.args, call.kwargs)) if _is_position(value)}
        swapped = call.arguments(lambda value, replaced=replaced: replaced.get(id(value), value))
        with torch.no_grad():
            output = call.replay_exactly(*swapped)
        made = list(tables_in(output, *position.shape))
        if len(made) <= index:  # at such a position two columns may agree that do not agree elsewhere
            return
        yield position.flatten() + offset, made[index]


def _handed_only(call: Call) -> Iterator[_Seen]:
    """Tables among the arguments of a call on hidden [B, S, H]."""
    if not call.has_stream or call.hidden.ndim != 3:
        return
    batch, length = call.hidden.shape[:2]
    for value in [*call.args, *call.kwargs.values()]:
        for table in tables_in(value, batch, length):
            yield _Seen(table, None, torch.arange(length).repeat(batch), [])


def _positions(call: Call) -> Tensor | None:
    """[B or 1, S]: the whole numbers that a call was given; of several kinds of position that are all equal, one."""
    for value in tensors((call.args, call.kwargs)):
        if _is_position(value):
            if value.ndim == 3:
                return value[0] if torch.equal(value, value[:1].expand_as(value)) else None
            return value if value.ndim == 2 else value[None]
    return None


def _is_position(value: Any) -> bool:
    return isinstance(value, Tensor) and value.dtype in {torch.int64, torch.int32} and 1 <= value.ndim <= 3


def _formula(seen: _Seen, config: Any) -> Candidate | None:
    module = seen.call.module if seen.call is not None else nn.Module()
    radius = float((seen.table.cos[0].square() + seen.table.sin[0].square())[0].sqrt())
    for theta in _numbers(config):
        for arguments in _scalings(theta, seen, config):
            for dim in _dims(theta, seen, module, config):
                for factor in _attention_factors(module, radius, theta):
                    whole: dict[str, Evidence | Candidate] = {
                        "dim": dim,
                        "theta": number(theta, float),
                        **arguments,
                        **factor,
                    }
                    candidate = _with_trained(Candidate("Rotary", whole, {}), seen, module)
                    if _agrees(candidate, seen, module, config) and _trained_alike(candidate, seen, config):
                        return candidate
    return None


def _with_trained(candidate: Candidate, seen: _Seen, module: nn.Module) -> Candidate:
    """The formula with frequencies that are stretched by what is trained, where the module has such a vector."""
    pairs = seen.table.cos.shape[-1]
    trained = [name for name, parameter in module.named_parameters() if parameter.shape == (pairs,)]
    if len(trained) != 1:
        return candidate
    arguments = {**candidate.arguments, "trained": present(trained[0])}
    return Candidate("Rotary", arguments, {"log_stretch": Stored(trained[0])})


def _agrees(candidate: Candidate, seen: _Seen, module: nn.Module, config: Any) -> bool:
    try:
        block = candidate.spec(module, config).build()
    except (ValueError, TypeError, KeyError, AttributeError, ZeroDivisionError):
        return False
    assert isinstance(block, Rotary)
    block.to(torch.float64).requires_grad_(False).load_state_dict(candidate.values(state_of(module)))
    for position, theirs in seen.moved or [(seen.position, seen.table)]:
        ours = block(position, torch.float64)
        for mine, table in zip(ours, (theirs.cos, theirs.sin), strict=True):
            if mine.shape != table.shape or not (mine - table).abs().max() <= TOLERANCE * max(1, position.max()):
                return False
    return True


def _trained_alike(candidate: Candidate, seen: _Seen, config: Any) -> bool:
    """Whether tables, and the gradients of what is trained in them, are the module's for other values of it, too."""
    if seen.call is None or not candidate.parameters:
        return True
    module, generator = seen.call.module, torch.Generator().manual_seed(0)
    theirs = dict(module.named_parameters())
    before = {name: parameter.detach().clone() for name, parameter in theirs.items()}
    block = candidate.build(module, config).to(torch.float64)
    try:
        return all(
            _alike_at(spread, candidate, seen, theirs, block, generator)
            for spread in (0.1, 1.0)  # frequencies hardly and much stretched
        )
    finally:
        with torch.no_grad():
            for name, parameter in theirs.items():
                parameter.copy_(before[name])


def _alike_at(
    spread: float,
    candidate: Candidate,
    seen: _Seen,
    theirs: Mapping[str, nn.Parameter],
    block: nn.Module,
    generator: torch.Generator,
) -> bool:
    call = seen.call
    assert call is not None
    position = _positions(call)
    assert position is not None
    with torch.no_grad():
        for parameter in theirs.values():
            parameter.copy_(spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    block.load_state_dict(candidate.values(state_of(call.module)))
    with torch.enable_grad():
        table = list(tables_in(call.replay_exactly(call.args, call.kwargs), *position.shape))[seen.index]
        ours = block(seen.position, torch.float64)
    cotangents = [torch.randn(part.shape, generator=generator, dtype=torch.float64) for part in ours]
    found = torch.autograd.grad((table.cos, table.sin), list(theirs.values()), cotangents)
    wanted = candidate.values(dict(zip(theirs, found, strict=True)))
    made = torch.autograd.grad(ours, [block.get_parameter(name) for name in wanted], cotangents)
    pairs = [*zip(ours, (table.cos, table.sin), strict=True), *zip(made, wanted.values(), strict=True)]
    return all(bool((one - other).norm() <= _TRAINED * other.norm()) for one, other in pairs)


# --- the arguments of the formula -----------------------------------------------------------------------------------


def _numbers(config: Any) -> list[Path]:
    """Where the config holds numbers above 1 that may be the base, those beside others of a rotary kind first."""
    found = [path for path, value in walk(config, ()) if _is_base(value)]
    return sorted(found, key=lambda path: ("theta" not in path[-1] and "base" not in path[-1], -len(path), path))


def _is_base(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1 < value < float("inf")


def _scalings(theta: Path, seen: _Seen, config: Any) -> list[dict[str, Evidence]]:
    """The ways to stretch that the settings beside the base have all numbers for; none at first."""
    beside = fields_of(at(config, theta[:-1])) or {}
    original = setting(theta, "original_max_position_embeddings", int, getattr(config, "max_position_embeddings", None))
    factor = setting(theta, "factor", float, 1.0)
    found: list[dict[str, Evidence]] = [{}]
    if beside.get("factor") is None and "original_max_position_embeddings" in beside:
        factor = Evidence(
            f"config max_position_embeddings / {original.label.removeprefix('config ')}",
            lambda module, config: float(config.max_position_embeddings / original.resolve(module, config)),
        )
    if beside.get("factor") is not None:
        found.append({"scaling": literal("linear", "the settings' factor"), "factor": factor})
        found.append(
            {"scaling": literal("dynamic", "the settings' factor"), "factor": factor, "original_length": original}
        )
    if "low_freq_factor" in beside:
        found.append(
            {"scaling": literal("llama3", "the settings' names"), "factor": factor, "original_length": original}
            | {name: setting(theta, name, float) for name in ("low_freq_factor", "high_freq_factor")}
        )
    if "partial_rotary_factor" in beside:
        share = setting(theta, "partial_rotary_factor", float)
        found.append(
            {"scaling": literal("proportional", "frequencies of 0"), "factor": factor, "rotated": _share(seen, share)}
        )
    if beside.get("factor") is not None or "original_max_position_embeddings" in beside:
        found.append(
            {"scaling": literal("yarn", "the settings' names"), "factor": factor, "original_length": original}
            | {"beta_fast": setting(theta, "beta_fast", float, 32.0)}
            | {"beta_slow": setting(theta, "beta_slow", float, 1.0)}
            | {"truncate": setting(theta, "truncate", bool, True)}
        )
    if "short_factor" in beside:
        found.append(
            {"scaling": literal("longrope", "the settings' names"), "original_length": original}
            | {f"{kind}_factors": setting(theta, f"{kind}_factor", list) for kind in ("short", "long")}
        )
    return found


def _share(seen: _Seen, share: Evidence) -> Evidence:
    pairs = seen.table.cos.shape[-1]
    return Evidence(
        f"{share.label} of the frequencies",
        lambda module, config: int(share.resolve(module, config) * 2 * _pairs(module, pairs) // 2),
    )


def _pairs(module: nn.Module, usual: int) -> int:
    """The frequencies of a module that has one buffer of them, else as many as were seen."""
    sizes = {buffer.shape[0] for buffer in module.buffers() if buffer.ndim == 1}
    return sizes.pop() if len(sizes) == 1 else usual


def _dims(theta: Path, seen: _Seen, module: nn.Module, config: Any) -> Iterator[Evidence]:
    """Twice the frequencies, as a buffer of them shows; or the size of which they are a share, which may be odd."""
    pairs = seen.table.cos.shape[-1]
    for share in (path for path, value in walk(config, ()) if path[:-1] == theta[:-1] and _is_share(value)):
        # A share may be odd, which the number of frequencies does not show.
        if _head(config) and int(_head(config) * at(config, share)) in {2 * pairs, 2 * pairs - 1}:
            yield Evidence(
                f"head size times config {'.'.join(share)}",
                lambda module, config, share=share: int(_head(config) * at(config, share)),
            )
    buffers = [name for name, buffer in module.named_buffers() if buffer.ndim == 1 and buffer.shape[0] == pairs]
    kind = theta[-2] if len(theta) > 1 else ""
    for name in sorted(buffers, key=lambda name: not name.startswith(kind)):
        yield Evidence(
            f"twice the size of {name}", lambda module, config, name=name: 2 * module.get_buffer(name).shape[0]
        )
        break
    sizes = [path for path, value in walk(config, ()) if type(value) is int and value > 1 and len(path) == 1]
    sizes.sort(key=lambda path: "head_dim" not in path[-1])
    shares = [path for path, value in walk(config, ()) if isinstance(value, float) and 0 < value < 1]
    shares.sort(key=lambda path: (path[:-1] != theta[:-1], "rotary" not in path[-1]))
    for size in sizes:
        if at(config, size) in {2 * pairs, 2 * pairs - 1}:
            yield number(size, int)
        for share in shares:
            if int(at(config, size) * at(config, share)) in {2 * pairs, 2 * pairs - 1}:
                yield Evidence(
                    f"config {'.'.join(size)} times {'.'.join(share)}",
                    lambda module, config, size=size, share=share: int(at(config, size) * at(config, share)),
                )
    yield literal(2 * pairs, "twice the frequencies of the table")


def _is_share(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < 1


def _head(config: Any) -> int:
    """The size of an attention head: as the config states it, or the heads' share of the stream; 0 where neither is."""
    held = config.to_dict()
    try:
        stated = getattr(config, "head_dim", None)
    except Exception:  # a config may refuse to say one number for layers that differ
        return 0
    hidden, heads = size_of(held, "hidden"), size_of(held, "heads")
    return stated if isinstance(stated, int) else hidden // heads if hidden and heads else 0


def _attention_factors(module: nn.Module, radius: float, theta: Path) -> Sequence[dict[str, Evidence]]:
    """Attributes of the module that hold the length of (cos, sin); nothing where that is 1 and no attribute is."""
    kind = theta[-2] if len(theta) > 1 else ""
    held = [
        name
        for name, value in vars(module).items()
        if isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value - radius) <= 1e-12
    ]
    held.sort(key=lambda name: (not name.startswith(kind), "scal" not in name, name))
    found = [
        {
            "attention_factor": Evidence(
                f"attribute {name}", lambda module, config, name=name: float(getattr(module, name))
            )
        }
        for name in held[:1]
    ]
    if found:
        return found
    return [{} if abs(radius - 1.0) <= 1e-12 else {"attention_factor": literal(radius, "length of (cos, sin)")}]
