"""Rules over the tensors of the real checkpoint, which may differ from the reference's files in three ways: names begin
with another prefix, weights are quantised, and a tensor that the reference shares between two places is stored for
both. All are decided from the names that are there."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from dayzero.onboard.oracle.reference import on_disk
from dayzero.onboard.rules.expressions import NoRule, stored_names
from dayzero.onboard.rules.search import progressions
from dayzero.runtime.quantisation import FORMATS, QuantizedTensor
from dayzero.runtime.spec import RuleSpec, SourceSpec
from dayzero.runtime.weights import Cast, Decoded, Rule, Source, Stored, Tie, Transpose


def with_shared(reference: nn.Module, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`stored`, which is what transformers writes of the reference, and what it leaves out: a tensor that has a second
    place in the model, under the name that it would have there (the head of a model that ties it to its embedding).

    Rules over these say `Tie`; `with_stored_copies` takes out what a checkpoint does not repeat.
    """
    state = {name: tensor for name, tensor in reference.state_dict().items() if tensor.numel()}
    if len({tensor.data_ptr() for tensor in state.values()}) == len(state):
        return dict(stored)
    every = on_disk(reference, {name: tensor.clone() for name, tensor in state.items()})
    repeated = {
        name: tensor
        for name, tensor in every.items()
        if name not in stored and any(_same(tensor, other) for other in stored.values())
    }
    return {**stored, **repeated}


def _same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def with_stored_copies(rules: Sequence[RuleSpec], names: Collection[str]) -> list[RuleSpec]:
    """The rules with only those copies of a shared tensor that are there, for the layers where they are.

    names: of the checkpoint's tensors. Where none of them is, the first stays: settling the ledger says what is lost.
    """
    return [made for rule in rules for made in _with_stored_copies(rule, names)]


def _with_stored_copies(rule: RuleSpec, names: Collection[str]) -> Iterator[RuleSpec]:
    built = rule.build()
    if not list(_ties(built.source)):
        yield rule
        return
    by_absent: dict[frozenset[str], list[int]] = defaultdict(list)
    for _, index in built.each():
        absent = frozenset(template for template, name, _ in instances(built, index) if name not in names)
        by_absent[absent].append(index.get("layer", 0))
    for absent, layers in by_absent.items():
        source = SourceSpec.of(_without(built.source, absent))
        for bounds in progressions(layers) if rule.ranges else [None]:
            ranges = {"layer": bounds} if bounds is not None else {}
            yield RuleSpec(parameter=rule.parameter, source=source, ranges=ranges)


def _ties(source: Source) -> Iterator[Tie]:
    if isinstance(source, Tie):
        yield source
    for child in source.children:
        yield from _ties(child)


def _without(source: Source, absent: Collection[str]) -> Source:
    """The expression without the copies whose names are absent."""
    if not isinstance(source, Tie):
        return source.with_children(tuple(_without(child, absent) for child in source.children))
    there = [part for part in source.parts if not set(stored_names(part)) & set(absent)] or [source.parts[0]]
    return Tie(tuple(there)) if there[1:] else there[0]


def with_prefix(rules: Sequence[RuleSpec], names: Collection[str]) -> list[RuleSpec]:
    """The rules with the prefix that the checkpoint's names have: `layers.0` for `model.layers.0`, or `language_model.`
    before all. names: of the checkpoint's tensors, quantised weights under the name they would have otherwise.

    One change of prefix must do for every name that is not there as it is. Raises NoRule where none does, naming a
    tensor, or where several do.
    """
    alone: set[str] = set()
    shared: dict[tuple, set[str]] = defaultdict(set)  # of these names one is enough
    for number, rule in enumerate(rules):
        built = rule.build()
        for parameter, index in built.each():
            for _, name, place in instances(built, index):
                (shared[number, parameter, *place] if place else alone).add(name)
    there = set(names)
    missing = sorted(
        [[name] for name in alone - there] + [sorted(alike) for alike in shared.values() if not alike & there]
    )
    if not missing:
        return list(rules)

    def fit(name: str, old: str, new: str) -> bool:
        return name.startswith(old) and new + name[len(old) :] in there

    fits = {
        (old, new)
        for first in missing[0]
        for old, new in _prefixes(first, names)
        if all(any(fit(name, old, new) for name in alike) for alike in missing)
    }
    if len(fits) != 1:
        also = f", nor {len(missing) - 1} others" if missing[1:] else ""
        why = f"under any prefix{also}" if not fits else f"under one prefix, but under {len(fits)}"
        raise NoRule(f"{missing[0][0]} is not in the checkpoint {why}")
    ((old, new),) = fits

    def change(rule: RuleSpec) -> RuleSpec:
        built = rule.build()
        absent = {
            template
            for _, index in built.each()
            for template, name, _ in instances(built, index)
            if name not in there and name.startswith(old)
        }
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


def instances(rule: Rule, index: Mapping[str, int]) -> Iterator[tuple[str, str, tuple]]:
    """(name with placeholders, name, place) of every tensor that the rule reads for these values. place: the same for
    the copies of a shared tensor, () for one that has none."""
    shared = {template: n for n, tie in enumerate(_ties(rule.source)) for template in stored_names(tie)}
    for leaf, inner, _ in rule.source.leaves(index):
        for name, template in zip(leaf.names(inner), stored_names(leaf), strict=True):
            yield template, name, (shared[template], *inner.items()) if template in shared else ()


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
        decoded: Source = Decoded(kind[0], kind[1:])
        decoded = Cast(to, decoded) if to is not None else decoded
        return Transpose(decoded) if FORMATS[kind[0]].swapped else decoded
    made = source.with_children(tuple(_decoding(child, kinds, to) for child in source.children))
    if isinstance(made, Transpose) and isinstance(made.part, Transpose):
        return made.part.part
    return made
