"""A whole model by rules: the layers, what stands around them, and where every parameter comes from."""

from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from dayzero.onboard.by_rules import ASSUMED
from dayzero.onboard.by_rules.layers import Found, Layer, norm
from dayzero.onboard.by_rules.settings import Settings
from dayzero.onboard.checkpoint import Checkpoint
from dayzero.onboard.config_fields import ConfigView
from dayzero.onboard.inspect.classify import Ledger
from dayzero.onboard.inspect.config_layers import compare
from dayzero.onboard.inspect.findings import holes, layer_count, sizes, tying
from dayzero.onboard.inspect.folded import fold_checkpoint
from dayzero.onboard.inspect.layer_kinds import Kind, kinds_of_layers
from dayzero.onboard.inspect.ledger import Finding, TensorGroup
from dayzero.onboard.inspect.tensor_names import Group, ranges
from dayzero.onboard.prove.proven import NotProven, Unproven
from dayzero.onboard.rules.on_disk import quantised_rules
from dayzero.onboard.rules.search import progressions
from dayzero.onboard.specify import Specification
from dayzero.runtime.errors import InputError
from dayzero.runtime.packed import QuantizedTensor, quantised_groups
from dayzero.runtime.safetensors_reader import SafetensorsReader
from dayzero.runtime.spec import LayerRun, ModelSpec, RuleSpec, SourceSpec
from dayzero.runtime.weights import Source, Stored, Tie

_MOST_NEGATIVE = 0.05  # share of a norm's values, above which they may be distances from 1
_Text = list[tuple[Group, TensorGroup, Found]]


def specify_by_rules(
    checkpoint: Checkpoint, ledger: Ledger, name: str, why: str, ignored: Mapping[str, Any]
) -> Specification:
    """The specification of a checkpoint without a reference: every block unverified.

    ledger: as `classify` gives it. why: there is no reference. ignored: config fields that a person accepts as they
    are. Raises NotProven with everything that rules could not decide.
    """
    packed = quantised_groups(checkpoint.headers)
    folded = fold_checkpoint(checkpoint.headers)
    text: _Text = [
        (raw, group, _found(raw, group, packed))
        for raw, group in zip(folded.groups, ledger.groups, strict=True)
        if group.part == "text" and group.part_of is None
    ]
    settings = Settings(ConfigView(checkpoint.config))
    kinds = kinds_of_layers([raw for raw, _, _ in text], [group.role for _, group, _ in text])
    kinds, found = compare(settings.view, kinds)
    tied, more = tying(settings.view, ledger.groups)
    found = [*found, *more, *layer_count(settings.view, kinds), *sizes(settings.view, ledger.groups)]
    found += holes(ledger.groups, folded.groups)
    open_items = [*_contradictions(found), *_beyond(kinds)]
    if open_items:  # what else is missing would only follow from it
        raise NotProven([_no_reference(why), *open_items])

    outside = {role: [made for raw, _, made in text if not raw.layers and made.role == role] for role in _OUTSIDE}
    open_items += _outside(text, outside, tied)
    embedding = next(iter(outside["embedding"]), None)
    hidden = embedding.shape[1] if embedding is not None else settings.size("hidden")
    layers = list(_layers(text, kinds, hidden, settings))
    specs = [layer.kind() for layer in layers]
    open_items += _open_in(layers)
    has = {name: True for layer in layers for name, there in layer.has.items() if there}
    sizes_of_heads = {layer.head_dim for layer in layers}
    whole = [spec for spec in specs if spec is not None]
    complete = len(whole) == len(specs)
    if complete and len(sizes_of_heads) != 1:
        open_items.append(
            Unproven("layers", f"heads of {sorted(sizes_of_heads)} channels: rules know one rotary table")
        )
    rotary = settings.rotary(max(sizes_of_heads) or settings.view.size("head_dim") or 2)
    last = next(iter(outside["norm"]), None)
    settings.number("eps")
    settings.check_windows(settings.size("layers"))
    open_items += settings.close(has, ignored, complete)
    open_items += _shifted_norms(checkpoint, text)
    if (settings.view.size("experts") or 0) > 1 and all(kind.ffn != "routed" for kind in kinds.values()):
        open_items.append(Unproven(f"config.json: {settings.view.said('experts')}", "no layer has routed experts"))
    if open_items or last is None or embedding is None:
        distinct = [item for place, item in enumerate(open_items) if item not in open_items[:place]]
        raise NotProven([_no_reference(why), *distinct])
    sources: list[tuple[dict[str, Source], list[int] | None]] = [
        ({"embed.weight": _embedding(embedding, outside["head"], tied), "norm.weight": Stored(last.pattern)}, None),
        *(({f"layers.{{layer}}.{p}": s for p, s in layer.sources.items()}, layer.numbers) for layer in layers),
    ]
    if not tied:
        sources[0][0]["head.weight"] = Stored(outside["head"][0].pattern)
    try:
        spec = ModelSpec(
            name=name,
            checkpoint=checkpoint.identity(),
            vocabulary=embedding.shape[0],
            hidden=hidden,
            tied=tied,
            rotaries=[rotary],
            layer_kinds=whole,
            layers=_runs([layer.numbers for layer in layers]),
            norm=norm(last, settings, [f"{ASSUMED}embeddings and logits are neither scaled nor capped"]),
            rules=quantised_rules(list(_rules(sources)), packed),
            max_positions=_positions(settings.view),
        )
    except (ValidationError, ValueError) as error:
        said = " ".join(str(error).split())[:200]
        raise InputError("config.json", found=said, expected="sizes that the blocks can have") from None
    return Specification(
        spec=spec,
        shrunk=spec,
        shrunk_config={},
        tried=[],
        unread=[],
        interventions=[],
        claims=[],
        towers=[],
        replaced=[],
        unverified=why,
    )


_OUTSIDE = ("embedding", "norm", "head")


def _no_reference(why: str) -> Unproven:
    todo = (
        "Give the checkpoint its modeling code (auto_map in config.json) and --trust-remote-code, or install a "
        "transformers that has the architecture."
    )
    return Unproven("config.json", f"{why}. Without a reference rules decide, and these are left open:", todo=todo)


def _found(raw: Group, group: TensorGroup, packed: Mapping[str, QuantizedTensor]) -> Found:
    """The tensors of a group, a quantised weight under the name and shape of the weight that it stands for."""
    pattern, codes = raw.pattern, raw.names[0]
    if group.format is not None:
        name = next(name for name, held in packed.items() if codes in held.parts.values())
        pattern = pattern[: len(pattern) - (len(codes) - len(name))] if codes.startswith(name) else pattern
    shape = tuple(group.logical_shape or group.shape)
    return Found(pattern, pattern.split("{layer}.", 1)[-1], shape, group.role, len(raw.experts))


def _contradictions(found: list[Finding]) -> Iterator[Unproven]:
    """Where the config and the tensors say different things, or tensors are missing."""
    for item in found:
        if item.kind in ("contradiction", "damage"):
            yield Unproven(item.what, "; ".join(item.evidence))


def _beyond(kinds: Mapping[int, Kind]) -> Iterator[Unproven]:
    """Kinds of layers that rules do not cover."""
    together: dict[Kind, list[int]] = {}
    for number, kind in kinds.items():
        is_covered = kind.mixer in ("full", "sliding") and kind.ffn in ("dense", "routed") and kind.residual == "plain"
        if not is_covered:
            together.setdefault(kind, []).append(number)
    for kind, numbers in together.items():
        what = f"{kind.mixer} mixer, {kind.ffn} feed-forward, {kind.residual} residual"
        why = (
            f"{what}: {'; '.join(kind.evidence)}. Rules cover full and sliding attention by queries, keys and values, "
        )
        yield Unproven(f"layers {ranges(numbers)}", f"{why}dense or routed feed-forward layers, and plain residuals")
    if not kinds:
        yield Unproven("layers", "no tensor's name has a layer's number")


def _outside(text: _Text, outside: Mapping[str, list[Found]], tied: bool) -> Iterator[Unproven]:
    """What stands around the layers has to be one embedding, one norm, and one head or none."""
    for raw, _, found in text:
        if not raw.layers and (found.role not in _OUTSIDE or found.leaf != "weight" or "{" in found.pattern):
            yield Unproven(found.pattern, f"{list(found.shape)} outside the layers: no rule says what it computes")
    prefixes = {found.pattern.partition("{layer}.")[0] for raw, _, found in text if raw.layers}
    if len(prefixes) > 1:
        yield Unproven("layers", f"they stand under several names: {', '.join(sorted(prefixes))}")
    for role, dims in {"embedding": 2, "norm": 1}.items():
        if [len(found.shape) for found in outside[role]] != [dims]:
            yield Unproven(role, f"found {', '.join(f.pattern for f in outside[role]) or 'none'}, expected one tensor")
    rows = [found.shape for found in (*outside["embedding"], *outside["head"])]
    if len(outside["head"]) > 1 or len(set(rows)) > 1 or (not tied and not outside["head"]):
        yield Unproven("head", f"found shapes {rows} of embedding and head, expected one head of the embedding's shape")
    if any(found.shape != shape[1:] for found in outside["norm"] for shape in rows):
        yield Unproven("norm", f"found {list(outside['norm'][0].shape)}, expected the width of the embedding")


def _layers(text: _Text, kinds: Mapping[int, Kind], hidden: int, settings: Settings) -> Iterator[Layer]:
    """Every kind of layer, by its tensors and its window."""
    members: dict[int, list[Found]] = {}
    for raw, _, found in text:
        for number in raw.layers:
            members.setdefault(number, []).append(found)
    together: dict[tuple[tuple[Found, ...], bool], list[int]] = {}
    for number, found in sorted(members.items()):
        together.setdefault((tuple(found), kinds[number].mixer == "sliding"), []).append(number)
    for (found, sliding), numbers in together.items():
        yield Layer(numbers, found, hidden, settings, sliding)


def _open_in(layers: list[Layer]) -> Iterator[Unproven]:
    """What stays undecided in layers, once for all layers in which it is the same."""
    together: dict[tuple[str, str], list[int]] = {}
    for layer in layers:
        for item in layer.open:
            together.setdefault(item, []).extend(layer.numbers)
    for (where, why), numbers in together.items():
        yield Unproven(where, why, layers=ranges(sorted(set(numbers))))


def _runs(layers: list[list[int]]) -> list[LayerRun]:
    """layers: of each kind its numbers."""
    kind_of = {number: kind for kind, numbers in enumerate(layers) for number in numbers}
    runs: list[LayerRun] = []
    for number in sorted(kind_of):
        if runs and runs[-1].kind == kind_of[number]:
            runs[-1] = runs[-1].model_copy(update={"count": runs[-1].count + 1})
        else:
            runs.append(LayerRun(first=number, count=1, kind=kind_of[number]))
    return runs


def _rules(sources: list[tuple[dict[str, Source], list[int] | None]]) -> Iterator[RuleSpec]:
    """One rule for all layers whose parameter comes from the same place."""
    together: dict[tuple[str, Source], list[int]] = {}
    for made, numbers in sources:
        for parameter, source in made.items():
            together.setdefault((parameter, source), []).extend(numbers or [])
    for (parameter, source), numbers in together.items():
        for bounds in progressions(sorted(numbers)) if numbers else [None]:
            ranges = {"layer": bounds} if bounds is not None else {}
            yield RuleSpec(parameter=parameter, source=SourceSpec.of(source), ranges=ranges)


def _embedding(embedding: Found, heads: list[Found], tied: bool) -> Source:
    """A head that is stored although it is tied repeats the embedding."""
    stored = Stored(embedding.pattern)
    return Tie((stored, Stored(heads[0].pattern))) if tied and heads else stored


def _positions(view: ConfigView) -> int | None:
    longest = view.get("max_position_embeddings")
    return longest if type(longest) is int and longest > 0 else None


def _shifted_norms(checkpoint: Checkpoint, text: _Text) -> Iterator[Unproven]:
    """A norm's weight is a factor, hardly ever negative; one that is stored as its distance from 1 often is. A few
    numbers of each are read, since nothing else tells the two apart."""
    files = {name: header.file for name, header in checkpoint.headers.items()}
    reader = SafetensorsReader(checkpoint.path, files)
    for raw, _, found in text:
        if "norm" not in found.role or len(found.shape) != 1:
            continue
        for name in (raw.names[0], raw.names[-1]):
            negative = (reader.read(name, (slice(0, found.shape[0]),)).float() < 0).float().mean().item()
            if negative > _MOST_NEGATIVE:
                share = f"{100 * negative:.0f} % of its values are negative"
                yield Unproven(name, f"{share}: it may be stored as its distance from 1, and nothing says so")
                break
