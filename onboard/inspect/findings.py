"""What a person should know about a checkpoint before using it: contradictions, holes, layouts that mislead."""

import re
from collections.abc import Iterator, Sequence

from dayzero.onboard.config_fields import ConfigView
from dayzero.onboard.inspect.layer_kinds import Kind
from dayzero.onboard.inspect.ledger import Finding, TensorGroup, finding
from dayzero.onboard.inspect.tensor_names import Group, stepped
from dayzero.runtime.strict_json import shown

_MTP_FIELDS = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_modules", "num_mtp_layers", "mtp_layers")
_TOWERS = {"vision": ("vision_config", "visual"), "audio": ("audio_config", "speech_config")}


def all_findings(
    view: ConfigView, groups: Sequence[TensorGroup], folded: Sequence[Group], kinds: dict[int, Kind], mtp: int
) -> Iterator[Finding]:
    """Every finding but those about single layers (`config_layers`). groups and folded are of the same tensors."""
    yield from names_of_the_model(view)
    yield from tying(view, groups)[1]
    yield from layer_count(view, kinds)
    yield from further_token_layers(view, mtp)
    yield from towers(view, groups)
    yield from sizes(view, groups)
    yield from holes(groups, folded)
    yield from paddings(groups)
    yield from float32(groups)


def names_of_the_model(view: ConfigView) -> Iterator[Finding]:
    """`model_type` proves nothing; where it and `architectures` name different classes, a loader may take either."""
    classes = [name for name in view.outer.get("architectures") or [] if isinstance(name, str)]
    kind = view.text.get("model_type")
    if not classes or not isinstance(kind, str):
        return
    plain = re.sub(r"_(text|moe)$", "", kind).replace("_", "").replace("-", "").lower()
    if not any(plain in name.replace("_", "").lower() for name in classes):
        yield finding(
            "contradiction",
            f"{view.prefix}model_type is {shown(kind)}, architectures says {classes[0]}",
            "neither decides anything here; a tool that builds by model_type builds another model",
        )


def tying(view: ConfigView, groups: Sequence[TensorGroup]) -> tuple[bool, list[Finding]]:
    """Whether head and embedding are one matrix: a head that is stored is used, unless the outer config says tied."""
    heads = [group.pattern for group in groups if group.role == "head" and group.part == "text"]
    outer, text = view.outer.get("tie_word_embeddings"), view.text.get("tie_word_embeddings")
    said = outer if outer is not None else text
    tied = bool(said) if heads and outer is not None else not heads
    found = []
    if outer is not None and text is not None and outer != text:
        line = f"tie_word_embeddings={outer}, {view.prefix}tie_word_embeddings={text}"
        stored = f"{heads[0]} is stored" if heads else "no head is stored"
        found.append(finding("contradiction", "outer and inner config disagree about the head", line, stored))
    elif heads and said:
        line = f"tie_word_embeddings={said}, yet {heads[0]} is stored"
        found.append(finding("contradiction", "the head is stored although the config ties it to the embedding", line))
    elif not heads and said is False and groups:
        line = "tie_word_embeddings=False, yet no tensor is a head"
        found.append(finding("damage", "the head is missing", line))
    return tied, found


def layer_count(view: ConfigView, kinds: dict[int, Kind]) -> Iterator[Finding]:
    """The config's number of layers against the layers that have tensors."""
    count = view.size("layers")
    if count is None or not kinds or (list(kinds) == list(range(len(kinds))) and len(kinds) == count):
        return
    extra = [layer for layer in kinds if layer >= count]
    inside = len(kinds) - len(extra)
    if extra:
        what = f"{view.said('layers')}, yet layers {stepped(extra)} are stored"
        yield finding("contradiction", what, f"layer {extra[0]} {'; '.join(kinds[extra[0]].evidence)}")
    if inside < count:
        stored = sorted(layer for layer in kinds if layer < count)
        line = f"they are {stepped(stored) or 'others'}"
        yield finding("damage", f"{view.said('layers')}, yet only {inside} of these layers have tensors", line)


def further_token_layers(view: ConfigView, stored: int) -> Iterator[Finding]:
    """Layers that predict further tokens: promised and stored."""
    field = next((name for name in _MTP_FIELDS if view.text.get(name) is not None), None)
    promised = view.get(field) if field is not None else None
    if type(promised) is not int:
        promised = 0
    if promised and not stored:
        line = f"{view.prefix}{field}={promised}; no tensor joins the hidden state with an embedding"
        yield finding("contradiction", "further-token layers are promised, and none is stored", line)
    elif stored != promised:
        line = f"{view.prefix}{field}={promised}" if field else "no config field counts them"
        kind = "contradiction" if field else "note"
        yield finding(kind, f"further-token layers are stored: {stored}", line)


def towers(view: ConfigView, groups: Sequence[TensorGroup]) -> Iterator[Finding]:
    """A vision or audio model that the config describes and that is not there, or the other way round."""
    for part, names in _TOWERS.items():
        said = next((name for name in names if isinstance(view.outer.get(name), dict)), None)
        stored = any(group.part == part for group in groups)
        if said and not stored:
            yield finding("contradiction", f"{said} describes a {part} tower, and none is stored", f"no {part} tensor")
        elif stored and not said:
            yield finding("note", f"a {part} tower is stored, and no config describes it", f"no {names[0]}")


def sizes(view: ConfigView, groups: Sequence[TensorGroup]) -> Iterator[Finding]:
    """Sizes of the config against shapes."""
    text = [group for group in groups if group.part == "text" and group.part_of is None]
    checks = [("embedding", 0, "vocabulary"), ("embedding", 1, "hidden"), ("router", 0, "experts")]
    for role, dim, meaning in checks:
        size = view.size(meaning)
        for group in text:
            shape = group.logical_shape or group.shape
            if group.role == role and size and len(shape) > dim and shape[dim] != size:
                line = f"{group.pattern} is {shape}"
                yield finding("contradiction", f"{view.said(meaning)} does not fit the tensors", line)
                break
    numbered = {number for group in text if group.role == "expert" for number in [group.experts] if number}
    size = view.size("experts")
    if size and len(numbered) == 1 and (only := numbered.pop()) not in {f"0-{size - 1}", "0"}:
        yield finding("contradiction", f"{view.said('experts')}, yet experts {only} are stored", "by their names")


def holes(groups: Sequence[TensorGroup], folded: Sequence[Group]) -> Iterator[Finding]:
    """Names that a pattern's ranges promise and that are not there. A pattern may have different shapes by layer: what
    one of them lacks, another may have."""
    there: dict[str, set[str]] = {}
    for group in folded:
        there.setdefault(group.pattern, set()).update(group.names)
    for group, shape in zip(folded, groups, strict=True):
        if not shape.missing:
            continue
        lacking = [name for name in group.missing() if name not in there[group.pattern]]
        if lacking:
            count = f"{len(lacking)} or more" if len(lacking) >= 1000 else str(len(lacking))
            line = f"{group.pattern}, layers {shape.layers}, experts {shape.experts or 'none'}: no {lacking[0]}"
            yield finding("damage", f"{count} tensors are missing from a regular pattern", line)


def live_heads(groups: Sequence[TensorGroup]) -> dict[str, int]:
    """Pattern of a padded per-head vector -> how many of its entries are heads: as many as the matrix beside it, which
    makes one value a head, has rows."""
    heads = {
        group.pattern.rsplit(".", 2)[0]: group.shape[0]
        for group in groups
        if group.role == "beta" and group.part == "text" and len(group.shape) == 2
    }
    found = {}
    for group in groups:
        count = heads.get(group.pattern.rsplit(".", 1)[0])
        if count and group.pattern.endswith("A_log") and max(group.shape, default=0) > count:
            found[group.pattern] = count
    return found


def paddings(groups: Sequence[TensorGroup]) -> Iterator[Finding]:
    """A per-head vector with more entries than there are heads."""
    live = live_heads(groups)
    for group in groups:
        if group.pattern in live:
            name, count = group.pattern.rsplit(".", 1)[-1], live[group.pattern]
            line = f"{group.pattern} is {group.shape}; the matrix beside it makes {count} values a token, one a head"
            yield finding("layout", f"{name} is padded: {max(group.shape)} stored, {count} heads", line)


def float32(groups: Sequence[TensorGroup]) -> Iterator[Finding]:
    """Tensors that someone kept in float32 on purpose: rounded to bfloat16, a router bias reroutes most tokens."""
    weights = [group for group in groups if group.part in {"text", "mtp"} and group.part_of is None]
    kept = {group.pattern for group in weights if group.dtype == "F32"}
    half = {group.pattern for group in weights if group.dtype in {"BF16", "F16"}} - kept
    if kept and half:
        tails = sorted({pattern.split("{layer}.")[-1] for pattern in kept})
        yield finding("layout", f"float32 and has to stay so: {len(tails)} of the patterns", ", ".join(tails))
