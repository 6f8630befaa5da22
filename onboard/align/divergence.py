"""Which part of a model that misses its reference is the first to do so.

Both run on one document with their modules watched: what each part reads, what it gives, what each layer gives. An
input that differs where all before it agrees accuses the sum that makes it; an output of an input that agrees, the
part.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from dayzero.onboard.align.ladder import THRESHOLDS
from dayzero.onboard.align.loading import NotLoaded, loaded_pair
from dayzero.onboard.oracle.calls import Call, floats, record_calls
from dayzero.onboard.prove.block import relative_error
from dayzero.onboard.shrink.shrink import SEQUENCE
from dayzero.runtime.package import Package
from dayzero.runtime.spec import BlockSpec


def first_divergence(generated: Package, config: Mapping[str, Any]) -> str:
    """One line: the part and what it stands for, "" where the forward pass shows no difference."""
    try:
        ours, reference = loaded_pair(generated, config, seed=7)
    except NotLoaded as error:
        return str(error)
    ids = torch.randint(3, generated.spec.tokens, (1, SEQUENCE), generator=torch.Generator().manual_seed(8))
    calls, logits = record_calls(reference, ids)
    seen = watched(ours, ids)
    last = ("the logits, their scale or their cap", seen.logits, [logits])
    for what, mine, theirs in (*_pairs(generated, seen, calls), last):
        if mine is None:
            return f"{what}, which does not run: {seen.stopped}"
        if not any(_agree(mine, value) for value in theirs):
            return what
    return ""


def _agree(mine: Tensor, theirs: Tensor) -> bool:
    return mine.numel() == theirs.numel() and relative_error(mine.reshape(theirs.shape), theirs) <= THRESHOLDS["L2"]


@dataclass
class Seen:
    """Of one pass, by module path: the first tensor that each module read, and all that it gave; the logits, or why
    there are none."""

    read: dict[str, Tensor] = field(default_factory=dict)
    gave: dict[str, list[Tensor]] = field(default_factory=dict)
    logits: Tensor | None = None
    stopped: str = ""

    def output(self, path: str) -> Tensor | None:
        """The first tensor that the module gave."""
        return self.gave.get(path, [None])[0]


def watched(model: nn.Module, ids: Tensor) -> Seen:
    """Our model on documents [B, S]."""
    seen, handles = Seen(), []
    for path, module in model.named_modules():

        def before(module: nn.Module, args: Any, path: str = path) -> None:
            if found := floats(args):
                seen.read[path] = found[0]

        def after(module: nn.Module, args: Any, output: Any, path: str = path) -> None:
            if found := floats(output):
                seen.gave[path] = found

        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    try:
        with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
            seen.logits = model(ids.flatten(), torch.arange(0, ids.numel() + 1, ids.shape[1]))
    except (RuntimeError, ValueError, IndexError, TypeError, KeyError) as error:
        seen.stopped = " ".join(str(error).split())[:200]
    finally:
        for handle in handles:
            handle.remove()
    return seen


def stands_for(name: str, seen: Seen, calls: Mapping[str, Call]) -> Call | None:
    """The call that read what our module `name` read and gave what it gave; if none gave that, one that gave as much.
    None where none read it."""
    alike = [call for call in calls.values() if call.has_stream and _agree(seen.read[name], call.hidden)]
    mine = seen.output(name)
    if mine is None:
        return alike[0] if alike else None
    alike = [call for call in alike if any(out.numel() == mine.numel() for out in floats(call.output))]
    alike.sort(key=lambda call: (not any(_agree(mine, out) for out in floats(call.output)), len(call.path)))
    return alike[0] if alike else None


def _pairs(
    generated: Package, seen: Seen, calls: Mapping[str, Call]
) -> Iterator[tuple[str, Tensor | None, list[Tensor]]]:
    """(what it is, ours, values of the reference of which it is one) in the order in which they are made; None for ours
    that was not reached."""
    spec = generated.spec
    if spec.embed_norm is not None and (call := calls.get(path_of(spec.embed_norm))) is not None:
        yield "what embed_norm reads, the embeddings and their scale", seen.read.get("embed_norm"), [call.hidden]
        yield f"embed_norm, for {call.path}", seen.output("embed_norm"), [call.result]
    layers = [(stack, index, kind) for stack, kinds in spec.stacks().items() for index, kind in enumerate(kinds)]
    for stack, index, kind in layers:
        layer, theirs = f"{stack}.{index}", calls.get(layer_path(kind.parts[0].block, index))
        if theirs is not None:
            alike = [made for made in floats((theirs.args, theirs.kwargs)) if made.shape == theirs.result.shape]
            if alike:
                yield f"what {layer} reads" + ("" if index else ", the embeddings"), seen.read.get(layer), alike
        for part in kind.parts:
            name, call = f"{layer}.{part.name}", calls.get(path_of(part.block, index))
            if call is not None and call.has_stream:
                yield f"what {name} reads, {part.reads!r}", seen.read.get(name), floats((call.args, call.kwargs))
                yield f"{name}, for {call.path}", seen.output(name), floats(call.output)
            elif theirs is not None:
                yield from _inside(name, seen, {p: c for p, c in calls.items() if p.startswith(f"{theirs.path}.")})
        if theirs is not None:
            yield f"what {layer} gives, {kind.gives!r}", seen.output(layer), [theirs.result]
    for name, block in (("merge", spec.merge), ("norm", spec.norm)):
        if block is not None and (call := calls.get(path_of(block))) is not None:
            yield f"{name}, for {call.path}", seen.output(name), [call.result]


def _inside(part: str, seen: Seen, calls: Mapping[str, Call]) -> Iterator[tuple[str, Tensor | None, list[Tensor]]]:
    """The same of the children of a part that stands for several modules, each for the one that reads what it reads."""
    for name in seen.read:
        if name.rpartition(".")[0] == part and (call := stands_for(name, seen, calls)) is not None:
            yield f"{name}, for {call.path}", seen.output(name), floats(call.output)


def path_of(block: BlockSpec, layer: int = 0) -> str:
    """Path of the reference module that the block of that layer stands for, "" where that is not one module."""
    return "" if block.proof is None or joins(block) else block.proof.module.replace("{layer}", str(layer))


def joins(block: BlockSpec) -> bool:
    """Whether the block is put together from blocks that stand for several modules of a layer."""
    inner = any(isinstance(argument, BlockSpec) for argument in block.arguments.values())
    return inner and block.block != "Lifted" and block.proof is not None and block.proof.module.endswith("{layer}")


def layer_path(block: BlockSpec, layer: int) -> str:
    """Path of the reference's layer, from that of a block inside it."""
    start, inside, _ = (block.proof.module if block.proof else "").partition("{layer}")
    return f"{start}{layer}" if inside else ""
