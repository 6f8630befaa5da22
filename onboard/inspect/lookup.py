"""Everything about one tensor, by its name."""

import difflib
from typing import Any

from dayzero.onboard.checkpoint import Checkpoint
from dayzero.onboard.inspect.ledger import Ledger, TensorGroup
from dayzero.onboard.inspect.tensor_names import counted, fill, pattern_of
from dayzero.runtime.errors import InputError
from dayzero.runtime.strict_json import shown

_SUGGESTED = 3


def group_of(ledger: Ledger, checkpoint: Checkpoint, name: str) -> TensorGroup:
    """The group that a tensor of the checkpoint belongs to, in a ledger as classified: settling it may part a group by
    experts, which the numbers of layers do not tell apart."""
    header = checkpoint.headers[name]
    pattern, numbers = pattern_of(name)
    fits = [
        group
        for group in ledger.groups
        if (group.pattern, group.dtype, tuple(group.shape)) == (pattern, header.dtype, header.shape)
    ]
    return next((group for group in fits if set(numbers) & set(counted(group.layers))), fits[0])


def look_up(ledger: Ledger, checkpoint: Checkpoint, name: str) -> dict[str, Any]:
    """Role, fate, dtype, shape, file, bytes and group. Raises InputError, with the nearest names, for a miss."""
    if name not in checkpoint.headers:
        names = nearest(ledger, checkpoint, name)
        raise InputError(
            shown(name)[1:-1],
            found=f"no such tensor among {ledger.tensors}",
            expected="one of its names",
            hint=f"Nearest: {', '.join(names)}" if names else "",
        )
    header, group = checkpoint.headers[name], group_of(ledger, checkpoint, name)
    numbers = pattern_of(name)[1]
    return {
        "name": name,
        "part": group.part,
        "role": group.role,
        "fate": group.fate,
        "reason": group.reason,
        "note": group.note,
        "dtype": header.dtype,
        "shape": list(header.shape),
        "format": group.format,
        "logical_shape": group.logical_shape,
        "stored_as": {role: fill(pattern, numbers) for role, pattern in group.parts.items()},
        "part_of": fill(group.part_of, numbers) if group.part_of else None,
        "file": header.file,
        "start": header.start,
        "end": header.end,
        "bytes": header.bytes,
        "group": {
            "pattern": group.pattern,
            "count": group.count,
            "layers": group.layers,
            "experts": group.experts,
            "others": group.others,
        },
    }


def nearest(ledger: Ledger, checkpoint: Checkpoint, name: str) -> list[str]:
    """Names of the most similar patterns, with the numbers that were asked for or the nearest there are."""
    pattern, numbers = pattern_of(name[:512])
    by_pattern: dict[str, list[TensorGroup]] = {}
    for group in ledger.groups:
        by_pattern.setdefault(group.pattern, []).append(group)
    found = []
    for similar in difflib.get_close_matches(pattern, list(by_pattern), _SUGGESTED, 0.4):
        for group in by_pattern[similar]:
            made = fill(similar, _nearest_numbers(group, numbers))
            if made in checkpoint.headers and made not in found:
                found.append(made)
    return found[:_SUGGESTED]


def _nearest_numbers(group: TensorGroup, wanted: tuple[int, ...]) -> list[int]:
    others = iter(group.others)
    made = []
    for position, piece in enumerate(group.pattern.split("{")[1:]):
        name = piece.split("}", 1)[0]
        texts = {"layer": group.layers, "expert": group.experts}
        choices = counted(texts[name] if name in texts else next(others, "0"))
        goal = wanted[position] if position < len(wanted) else 0
        made.append(min(choices, key=lambda number: abs(number - goal)))
    return made
