"""Rules over the tensors of the real checkpoint, which may differ from the reference's files in two ways: names begin
with another prefix, and weights are quantised. Both are decided from the names that are there."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from dayzero.onboard.expressions import NoRule, stored_names
from dayzero.onboard.rules import progressions
from dayzero.runtime.quantisation import QuantizedTensor
from dayzero.runtime.spec import RuleSpec, SourceSpec
from dayzero.runtime.weights import Cast, Decoded, Rule, Source, Stored


def with_prefix(rules: Sequence[RuleSpec], names: Collection[str]) -> list[RuleSpec]:
    """The rules with the prefix that the checkpoint's names have: `layers.0` for `model.layers.0`, or `language_model.`
    before all. names: of the checkpoint's tensors, quantised weights under the name they would have otherwise.

    One change of prefix must do for every name that is not there as it is. Raises NoRule where none does, naming a
    tensor, or where several do.
    """
    wanted = {name for rule in rules for _, name in _instances(rule.build())}
    missing = sorted(wanted - set(names))
    if not missing:
        return list(rules)
    fits = {
        (old, new)
        for old, new in _prefixes(missing[0], names)
        if all(name.startswith(old) and new + name[len(old) :] in names for name in missing)
    }
    if len(fits) != 1:
        also = f", nor {len(missing) - 1} others" if missing[1:] else ""
        why = f"under any prefix{also}" if not fits else f"under one prefix, but under {len(fits)}"
        raise NoRule(f"{missing[0]} is not in the checkpoint {why}")
    ((old, new),) = fits
    there = set(names)

    def change(rule: RuleSpec) -> RuleSpec:
        built = rule.build()
        absent = {template for template, name in _instances(built) if name not in there}
        source = built.source.renamed(lambda name: new + name[len(old) :] if name in absent else name)
        return rule.model_copy(update={"source": SourceSpec.of(source)})

    return [change(rule) for rule in rules]


def _prefixes(name: str, names: Iterable[str]) -> Iterator[tuple[str, str]]:
    """(prefix of `name`, other prefix) under which it would be one of `names`, the longest common ending only."""
    cuts = [0, *(i + 1 for i, letter in enumerate(name) if letter == ".")]
    for cut in cuts:
        ending = name[cut:]
        found = [(name[:cut], other[: len(other) - len(ending)]) for other in names if other.endswith(ending)]
        found = [(old, new) for old, new in found if not new or new.endswith(".")]
        if found:
            yield from found
            return


def _instances(rule: Rule) -> Iterator[tuple[str, str]]:
    """(name with placeholders, name) of every tensor that the rule reads, for all its values."""
    templates = stored_names(rule.source)
    for _, index in rule.each():
        found: dict[str, None] = {}
        for leaf, inner, _ in rule.source.leaves(index):
            for name, template in zip(leaf.names(inner), stored_names(leaf), strict=True):
                found[template] = None
                yield template, name
        assert found.keys() == set(templates)


def quantised_rules(
    rules: Sequence[RuleSpec], groups: Mapping[str, QuantizedTensor], to: str | None = "bfloat16"
) -> list[RuleSpec]:
    """The rules with every tensor that the checkpoint stores quantised decoded on the way, for the layers where it is.

    groups: `quantised_groups` of the checkpoint. to: the dtype that decoded values are rounded to, as the reference
    does; None keeps them in float32. Raises NoRule where a stack has some experts quantised and some not.
    """
    return [made for rule in rules for made in _quantised(rule, groups, to)]


def _quantised(rule: RuleSpec, groups: Mapping[str, QuantizedTensor], to: str | None) -> Iterator[RuleSpec]:
    built = rule.build()
    by_kind: dict[tuple, list[int]] = defaultdict(list)
    for _, index in built.each():
        kinds: dict[str, tuple | None] = {}
        for leaf, inner, _ in built.source.leaves(index):
            (template,), (name,) = stored_names(leaf), leaf.names(inner)
            kind = _kind(template, name, groups.get(name))
            if kinds.setdefault(template, kind) != kind:
                raise NoRule(f"{name} is stored in another way than its siblings in {rule.parameter}")
        by_kind[tuple(kinds.items())].append(index.get("layer", 0))
    for held, layers in by_kind.items():
        source = SourceSpec.of(_decoding(built.source, dict(held), to))
        for bounds in progressions(layers) if rule.ranges else [None]:
            ranges = {"layer": bounds} if bounds is not None else {}
            yield RuleSpec(parameter=rule.parameter, source=source, ranges=ranges)


def _kind(template: str, name: str, group: QuantizedTensor | None) -> tuple | None:
    """(format, (role, template of the part's name), ...), None for a tensor as it is."""
    if group is None:
        return None
    parts = []
    for role, part in group.parts.items():
        shared = next(
            (i for i, (a, b) in enumerate(zip(name, part, strict=False)) if a != b), min(len(name), len(part))
        )
        ending = name[shared:]
        if not template.endswith(ending):
            raise NoRule(f"{part} is part of {name}, but their names differ before a number")
        parts.append((role, template[: len(template) - len(ending)] + part[shared:]))
    return group.format, *parts


def _decoding(source: Source, kinds: Mapping[str, tuple | None], to: str | None) -> Source:
    if isinstance(source, Stored):
        kind = kinds[source.name]
        if kind is None:
            return source
        decoded = Decoded(kind[0], kind[1:])
        return Cast(to, decoded) if to is not None else decoded
    return source.with_children(tuple(_decoding(child, kinds, to) for child in source.children))
