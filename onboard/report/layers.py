"""What a report shows of layers: their parts and how these are wired, what stands around them, what is lifted."""

from typing import Any

from dayzero.onboard.by_rules import ASSUMED
from dayzero.onboard.inspect.tensor_names import ranges
from dayzero.runtime.nn import BLOCKS
from dayzero.runtime.spec import BlockSpec, LayerKind, ModelSpec, PartSpec

SHOWN = 5  # differences between kinds of layers that a row has room for


def title(block: BlockSpec) -> str:
    """The block by its name; what it stands around, or the class that it was lifted from, by theirs."""
    held = block.arguments
    if block.block == "Lifted":
        replaced = [title(inner) for inner in (held.get("replace") or {}).values()]
        return f"{held['module']}, lifted" + (f", around {', '.join(replaced)}" if replaced else "")
    inner = held.get("block")
    if isinstance(inner, BlockSpec):
        return f"{title(inner)} in {block.block}"
    name = (
        f"{title(held['attention'])} in {block.block}" if isinstance(held.get("attention"), BlockSpec) else block.block
    )
    router, indexer = held.get("router"), held.get("indexer")
    if isinstance(router, BlockSpec) and is_lifted(router):
        return f"{name} with {router.arguments['module']}, lifted"
    return f"{name} + {indexer.block}" if isinstance(indexer, BlockSpec) else name


def is_lifted(block: BlockSpec) -> bool:
    return any(getattr(BLOCKS[inner.block], "holds_lifted", False) for inner in block.walk())


def layers_of(spec: ModelSpec) -> list[tuple[str, int, list[int]]]:
    """("" or "encoder ", kind of layer, its layers) for every kind, in the order in which kinds first come."""
    stacks = {"encoder ": spec.encoder.layers if spec.encoder is not None else [], "": spec.layers}
    made: list[tuple[str, int, list[int]]] = []
    for whose, runs in stacks.items():
        found: dict[int, list[int]] = {}
        for run in runs:
            found.setdefault(run.kind, []).extend(range(run.first, run.first + run.count))
        made += [(whose, kind, layers) for kind, layers in found.items()]
    return made


def shown(kind: LayerKind, role: str) -> str:
    """The parts of a role, "-" where a layer has none."""
    return " + ".join(title(part.block) for part in kind.parts if _is(part, role)) or "-"


def _is(part: PartSpec, role: str) -> bool:
    return part.name == role or part.name.removeprefix(f"{role}_").isdecimal()


def kinds(spec: ModelSpec) -> list[dict[str, Any]]:
    """For each kind of layer: layers, mixer, ffn, what tells it from the first kind of the same blocks, its parts."""
    made, first = [], {}
    for whose, number, layers in layers_of(spec):
        kind = spec.layer_kinds[number]
        mixer, ffn = shown(kind, "mixer"), shown(kind, "ffn")
        alike = first.setdefault((whose, mixer, ffn), kind)
        made.append(
            {
                "layers": whose + ranges(layers),
                "name": whose + _layers(layers),
                "mixer": mixer,
                "ffn": ffn,
                "differs": "" if alike is kind else "; ".join(_differences(alike, kind)),
                "parts": [*(_part(part) for part in kind.parts), *_again(kind)],
                "gives": kind.gives + (f", in later passes {kind.again.gives}" if kind.again else ""),
                "keeps": kind.keeps,
            }
        )
    return made


def _part(part: PartSpec) -> dict[str, Any]:
    proof = part.block.proof
    return {
        "name": part.name,
        "title": title(part.block),
        "reads": part.reads,
        "module": module_of(part.block),
        "status": proof.status if proof else "unverified",
        "error": proof.error if proof and proof.error is not None else float("inf"),
    }


def _again(kind: LayerKind) -> list[dict[str, Any]]:
    """What it computes in later passes."""
    if kind.again is None:
        return []
    parts = {part.name: part for part in kind.all_parts}
    return [
        {**_part(parts[step.part]), "name": f"again: {step.name}", "reads": step.reads} for step in kind.again.steps
    ]


def module_of(block: BlockSpec) -> str:
    """The reference module that it stands for."""
    return block.proof.module.rstrip(".") if block.proof else "-"


def _differences(before: LayerKind, after: LayerKind) -> list[str]:
    """Arguments that the second kind has and the first has not, as "mixer.window 4096"."""
    old, new = ({p.name: _flat(p.block) for p in kind.all_parts} for kind in (before, after))
    found: list[str] = []
    for name, held in new.items():
        said: list[str] = []
        for path, value in held.items():
            inside = any(path.startswith(f"{block}.") for block in said)  # of a block that is new as a whole
            if not inside and old.get(name, {}).get(path) != value:
                found.append(f"{name}.{path} {value}")
                said += [path] if any(other.startswith(f"{path}.") for other in held) else []
    found += [f"no {name}" for name in old if name not in new]
    found += [f"no {name}.{path}" for name in new for path in old.get(name, {}) if path not in new[name]]
    return found if len(found) <= SHOWN else [*found[:SHOWN], f"and {len(found) - SHOWN} more"]


def _flat(block: BlockSpec) -> dict[str, str]:
    made: dict[str, str] = {}
    for name, value in block.arguments.items():
        if isinstance(value, BlockSpec):
            made |= {f"{name}": value.block} | {f"{name}.{path}": held for path, held in _flat(value).items()}
        elif not isinstance(value, dict):
            made[name] = str(value)
    return made


def uses(spec: ModelSpec) -> list[tuple[BlockSpec, str]]:
    """(block, where the model has it) for every distinct block: "mixer of layers 0-2, 4"."""
    where: list[tuple[BlockSpec, dict[str, list[int]]]] = []
    for whose, number, layers in layers_of(spec):
        for name, block in spec.layer_kinds[number].blocks.items():
            found = next((held for known, held in where if known == block), None)
            if found is None:
                where.append((block, found := {}))
            found.setdefault(f"{name} of {whose}", []).extend(layers)
    made = [(block, _where(held)) for block, held in where]
    rest: list[tuple[str, BlockSpec | None]] = [
        ("embedding norm", spec.embed_norm),
        ("merge of streams", spec.merge),
        ("last norm", spec.norm),
    ]
    rest.append(("growth of queries", spec.query_scale))
    rest.append(("inputs of layers", spec.layer_inputs))
    rest.append(("positions added to embeddings", spec.positions))
    if spec.loop is not None:
        rest.append(("messages between passes", spec.loop.message))
    if spec.encoder is not None:
        rest += [("last norm of the encoder", spec.encoder.norm), ("positions of the encoder", spec.encoder.positions)]
    rest += [(f"rotary table {number}", rotary) for number, rotary in enumerate(spec.rotaries)]
    return [*made, *((block, name) for name, block in rest if block is not None)]


def assumed(spec: ModelSpec) -> list[tuple[str, str]]:
    """(what rules took for granted, where) of a model that was made without a reference."""
    found: dict[str, list[str]] = {}
    for block, where in uses(spec):
        for line in block.proof.evidence if block.proof else ():
            if line.startswith(ASSUMED):
                found.setdefault(line.removeprefix(ASSUMED), []).append(where)
    return [(line, "; ".join(places)) for line, places in found.items()]


def _where(places: dict[str, list[int]]) -> str:
    return ", ".join(f"{name}{_layers(sorted(layers))}" for name, layers in places.items())


def _layers(numbers: list[int]) -> str:
    return f"layer {numbers[0]}" if len(numbers) == 1 else f"layers {ranges(numbers)}"


def around(spec: ModelSpec) -> list[tuple[str, str]]:
    """(what, how) for all that the model has beside its layers and that is not the usual."""
    rows: list[tuple[str, str]] = [("embedding", f"{spec.vocabulary} x {spec.hidden}" + _times(spec.embed_scale))]
    if spec.embed_norm is not None:
        rows.append(("embedding norm", title(spec.embed_norm)))
    for number, rotary in enumerate(spec.rotaries):
        settings = ", ".join(f"{name} {_value(value)}" for name, value in rotary.arguments.items())
        rows.append((f"rotary table {number}", settings))
    if spec.query_scale is not None:
        rows.append(("growth of queries", title(spec.query_scale)))
    if spec.positions is not None:
        rows.append(("positions", title(spec.positions)))
    if (encoder := spec.encoder) is not None:
        table = "an embedding of its own" if encoder.own_embedding else "the decoder's embedding"
        table += _times(encoder.embed_scale) + (f" + {title(encoder.positions)}" if encoder.positions else "")
        rows.append(("encoder", f"{len(encoder.kinds)} layers, reads {table}; last norm {title(encoder.norm)}"))
    if spec.streams > 1:
        rows.append(("streams", f"{spec.streams} copies of the residual between layers"))
    if spec.history:
        rows.append(("history", "layers look back at what earlier ones kept"))
    if (loop := spec.loop) is not None:
        how = f"layers {ranges(range(loop.first, loop.first + loop.count))} run {loop.passes} times"
        how += ", each time from where the first began" if loop.restarts else ""
        rows.append(("loop", how + (f", with messages by {title(loop.message)}" if loop.message else "")))
    for number, kind in enumerate(spec.shared):
        names = [part.name for part in spec.layer_kinds[kind].parts if part.shared]
        layers = [layer for layer, (_, which, _) in enumerate(spec.uses()) if which == number]
        rows.append((f"shared parts {number}", f"{', '.join(names)} of layers {ranges(layers)}, held once"))
    if spec.merge is not None:
        rows.append(("merge", title(spec.merge)))
    rows.append(("last norm", title(spec.norm)))
    head = "the embedding's matrix" if spec.tied else "a matrix of its own"
    head += f", of {spec.head_rows} rows" if spec.head_rows is not None else ""
    head += ", with a bias" if spec.head_bias else ""
    head += _times(spec.logit_scale)
    head += f", softcap {spec.logit_softcap:.6g}" if spec.logit_softcap is not None else ""
    head += f", {spec.logit_rows} of its rows are tokens" if spec.logit_rows is not None else ""
    return [*rows, ("head", head)]


def _times(scale: float) -> str:
    return "" if scale == 1.0 else f", times {scale:.6g}"


def _value(value: Any) -> str:
    if isinstance(value, list):
        return f"{len(value)} numbers"
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def lifted(spec: ModelSpec) -> list[tuple[str, str, str]]:
    """(module, where the model has it, why no block stands for it) of the reference modules whose own code is run."""
    found: dict[tuple[str, str], dict[str, list[int]]] = {}
    for whose, number, layers in layers_of(spec):
        for name, block in spec.layer_kinds[number].blocks.items():
            if is_lifted(block):
                places = found.setdefault((module_of(block), block.proof.why if block.proof else ""), {})
                places.setdefault(whose if name == "layer" else f"{name} of {whose}", []).extend(layers)
    return [(module, _where(places), why) for (module, why), places in found.items()]
