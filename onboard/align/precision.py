"""What is computed in float32 when a model runs in bfloat16: by the reference, whose own casts say so, and by ours.

The proofs are in float64 and cannot see it. Both models of the small config run once in bfloat16 as they are trained:
parameters and what passes between modules in bfloat16, buffers in float32. A step that the reference runs in float32
alone and ours in bfloat16 is told; it fails no rung.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.align.ladder import Float32
from dayzero.onboard.align.loading import NotLoaded, loaded_pair
from dayzero.onboard.align.places import layers_of, places
from dayzero.onboard.oracle.documents import documents
from dayzero.onboard.oracle.narrow import in_bfloat16
from dayzero.onboard.oracle.reference import logits_of
from dayzero.onboard.prove.trace import Step, trace_modules
from dayzero.onboard.shrink.shrink import SEQUENCE
from dayzero.runtime.package import Package

_NARROW = 2  # bytes of a bfloat16
# Attention in one operator sums, and takes its softmax, in float32 whatever it is given.
_FUSED = "_scaled_dot_product"
_CAST = {"to_copy", "_to_copy"}


def float32_steps(generated: Package, config: Mapping[str, Any]) -> list[Float32]:
    """One entry for each reference module and block that stands for it, of those that compute anything in float32, and
    one for what layers pass on. generated: the shrunk package; config: the shrunk config. [] where the two do not run
    side by side in bfloat16."""
    try:
        ours, reference = loaded_pair(generated, config, seed=5)
    except NotLoaded:
        return []
    ids = documents(reference, generated.spec.tokens, SEQUENCE, torch.Generator().manual_seed(6))
    bounds = torch.arange(0, ids.numel() + 1, ids.shape[1])
    try:
        theirs = _traced(reference, ids)
        with in_bfloat16(ours, {"rotaries."}):
            mine = trace_modules(ours, lambda: ours(ids.flatten(), bounds))
    except (RuntimeError, TypeError, ValueError, IndexError):
        return []
    found: dict[tuple[str, str], Float32] = {}
    for place in places(generated, ours):
        # The root is the path of a block that joins several modules; what holds the layers computes all of them.
        holds_layers = layers_of(generated).startswith(f"{place.path}.") or not place.path
        if not holds_layers and place.path in theirs and place.name in mine and place.spec.proof is not None:
            entry = compared(place.spec.proof.module, place.spec.block, theirs[place.path], mine[place.name])
            key = (entry.module, entry.block)
            found[key] = _joined(found[key], entry) if key in found else entry
    stream = _stream(layers_of(generated), theirs, mine)
    return [entry for entry in (*stream, *found.values()) if entry.steps]


def _joined(one: Float32, other: Float32) -> Float32:
    """Of two layers whose blocks have the same name."""
    held = {name: sorted({*getattr(one, name), *getattr(other, name)}) for name in ("steps", "narrow")}
    return one.model_copy(update={"casts": max(one.casts, other.casts), **held})


def _stream(path: str, theirs: Mapping[str, list[Step]], mine: Mapping[str, list[Step]]) -> Iterator[Float32]:
    """Whether the last layer's last sum, which it passes on, is in float32."""
    last = max(
        (int(name.rpartition(".")[2]) for name in theirs if re.fullmatch(rf"{re.escape(path)}\.\d+", name)), default=0
    )
    sums = [
        next((step for step in reversed(steps) if "add" in step.arithmetic), None)
        for steps in (theirs.get(f"{path}.{last}", []), mine.get(f"layers.{last}", []))
    ]
    if all(sums) and not _is_narrow(sums[0].dtype):  # type: ignore[union-attr]
        narrow = ["add"] if _is_narrow(sums[1].dtype) else []  # type: ignore[union-attr]
        yield Float32(module=path, block="DecoderLayer", casts=0, steps=["add"], narrow=narrow)


def compared(module: str, block: str, theirs: Iterable[Step], mine: Iterable[Step]) -> Float32:
    """The steps that the reference runs in float32 and never in bfloat16, and those of them that ours runs in it."""
    theirs, mine = list(theirs), list(mine)
    wide = _keys(theirs, narrow=False) - _keys(theirs, narrow=True)
    casts = sum(step.name in _CAST and _is_narrow(step.reads) and not _is_narrow(step.dtype) for step in theirs)
    return Float32(
        module=module,
        block=block,
        casts=casts,
        steps=sorted({step for step, _ in wide}),
        narrow=sorted({step for step, _ in wide & _keys(mine, narrow=True)}),
    )


def _keys(steps: Iterable[Step], narrow: bool) -> set[tuple[str, int]]:
    """(arithmetic, columns of its result) of the steps in bfloat16, or of the others; columns of products alone, which
    are several in a module and are told apart by them."""
    found = set()
    for step in steps:
        wide = not _is_narrow(step.dtype) or step.name.startswith(_FUSED)
        if step.dtype is not None and wide != narrow:
            found |= {(name, step.gives[-1] if name == "matmul" and step.gives else 0) for name in step.arithmetic}
    return found


def _is_narrow(dtype: torch.dtype | None) -> bool:
    return dtype is not None and dtype.itemsize <= _NARROW


def _traced(reference: nn.Module, ids: Tensor) -> dict[str, list[Step]]:
    """With its buffers in float32; in bfloat16, as its constructor would make them, where it does not run so."""
    kept = _kept_wide(reference)
    try:
        with in_bfloat16(reference, kept):
            return trace_modules(reference, lambda: logits_of(reference, ids))
    except RuntimeError:
        with in_bfloat16(reference, kept, torch.bfloat16):
            return trace_modules(reference, lambda: logits_of(reference, ids))


def _kept_wide(reference: nn.Module) -> set[str]:
    """Parts of names of parameters that the reference keeps in float32 when it is loaded in bfloat16."""
    held = (getattr(module, "_keep_in_fp32_modules_strict", None) or () for module in reference.modules())
    return {name for names in held for name in names}
