"""Files that transformers reads and would not write so: names that it turns into others, and tensors that stand in the
layout that they have inside the reference. One kind of model is published with experts one by one and with experts in
one tensor, and the name that is written may be another than the one that was read."""

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from dayzero.onboard.rules.expressions import NOWHERE, NUMBER, StoredValues
from dayzero.onboard.rules.on_disk import instances
from dayzero.onboard.rules.search import progressions
from dayzero.onboard.rules.settle import numberless
from dayzero.runtime.spec import RuleSpec, SourceSpec
from dayzero.runtime.weights import Rule


def as_held(reference: nn.Module, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`stored`, which is what transformers writes of the reference, with every tensor of it that the reference holds
    under another name or in another layout as it holds it. Found by the values, which all differ."""
    known, made = StoredValues(stored), dict(stored)
    for name, tensor in reference.state_dict().items():
        if not tensor.numel() or (name in stored and torch.equal(stored[name], tensor)):
            continue
        owners = known.owners(tensor).unique().tolist()
        names = [known.name(number) for number in owners if number >= 0]
        if NOWHERE not in owners and sum(stored[written].numel() for written in names) == tensor.numel():
            for written in names:
                made.pop(written, None)
            made[name] = tensor.clone()
    return made


def as_read(rules: Sequence[RuleSpec], reference: nn.Module, names: Collection[str]) -> list[RuleSpec]:
    """The rules over those names of the checkpoint that the reference's loader takes for the same as theirs.

    names: of the checkpoint's tensors. A name that is there, or for which none or several are, stays.
    """
    loaded = _loader(reference)
    by_target: dict[tuple[str, str | None], set[str]] = defaultdict(set)
    for pattern, name in {numberless(name): name for name in names}.items():
        by_target[loaded(name)].add(pattern)

    def change(rule: RuleSpec) -> RuleSpec:
        built = rule.build()
        first = next((index for _, index in built.each()), None)
        new: dict[str, str] = {}
        for template, name, _ in instances(built, first) if first is not None else ():
            found = by_target.get(loaded(name), set()) if template not in new and name not in names else set()
            if len(found) == 1:
                new[template] = _numbered_as(next(iter(found)), template)
        source = built.source.renamed(lambda name: new.get(name, name))
        moved, those = Rule(rule.parameter, source, built.ranges), set(new.values())
        read = {name for _, index in moved.each() for template, name, _ in instances(moved, index) if template in those}
        return rule.model_copy(update={"source": SourceSpec.of(source)}) if read <= set(names) else rule

    return [change(rule) for rule in rules]


def _loader(reference: nn.Module) -> Callable[[str], tuple[str, str | None]]:
    """Name in a file -> (the tensor of the reference that it is read into, numberless; which part of it it is)."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    mapping = get_model_conversion_mapping(reference)  # type: ignore[arg-type]
    renamings = [made for made in mapping if isinstance(made, WeightRenaming)]
    converters = [made for made in mapping if isinstance(made, WeightConverter)]
    prefix, state = getattr(reference, "base_model_prefix", None), reference.state_dict()

    def loaded(name: str) -> tuple[str, str | None]:
        target, part = rename_source_key(name, renamings, converters, prefix, state)
        if target not in state and name in state:
            target, part = name, None
        return numberless(target), part

    return loaded


def _numbered_as(pattern: str, template: str) -> str:
    """The pattern with the placeholders and numbers of `template`, in order; itself where there are not as many."""
    numbers = re.findall(r"\{[^}]*\}|(?<=\.)\d+(?=\.|$)", template)
    pieces = pattern.split("{n}")
    if len(pieces) != len(numbers) + 1:
        return pattern
    return "".join(piece + number for piece, number in zip(pieces, [*numbers, ""], strict=True))


def whichever_is_there(rules: Sequence[RuleSpec], others: Sequence[RuleSpec], names: Collection[str]) -> list[RuleSpec]:
    """The rules, with another in the place of each, and for the layers, of which the tensors are not there and those of
    the other are. Where neither are, what most layers of the rule have: so what is missing has its likeliest name.

    names: of the checkpoint's tensors; prefixes, up to the first number of a name, do not count here.
    """
    tails = {_tail(name) for name in names}
    others_of = {parameter: (other, index) for other in others for parameter, index in other.build().each()}
    made: dict[tuple[str, str], tuple[RuleSpec, list[int]]] = {}
    for rule in rules:
        built = rule.build()
        there: dict[str, list[tuple[RuleSpec, int]]] = {"rule": [], "other": [], "neither": []}
        for parameter, index in built.each():
            other, same = others_of.get(parameter, (rule, index))
            mine = _is_there(built, index, tails)
            which = "rule" if mine else "other" if _is_there(other.build(), same, tails) else "neither"
            there[which].append((other, index.get("layer", 0)))
        likely = "other" if len(there["other"]) > len(there["rule"]) else "rule"
        for which, found in there.items():
            for other, layer in found:
                chosen = other if (likely if which == "neither" else which) == "other" else rule
                key = chosen.parameter, chosen.source.model_dump_json()
                made.setdefault(key, (chosen, []))[1].append(layer)
    return [part for rule, layers in made.values() for part in _for_layers(rule, layers)]


def _for_layers(rule: RuleSpec, layers: list[int]) -> Iterator[RuleSpec]:
    for bounds in progressions(sorted(layers)) if rule.ranges else [None]:
        yield rule.model_copy(update={"ranges": {"layer": bounds} if bounds is not None else {}})


def _is_there(rule: Rule, index: Mapping[str, int], tails: Collection[str]) -> bool:
    """Whether all tensors that the rule reads are there; of copies of a shared one, one is enough."""
    alike: dict[tuple, list[bool]] = defaultdict(list)
    for number, (_, name, place) in enumerate(instances(rule, index)):
        alike[place or (number,)].append(_tail(name) in tails)
    return all(map(any, alike.values()))


def _tail(name: str) -> str:
    """The name from its first number on; its last two components where it has none."""
    match = NUMBER.search(name)
    return name[match.start() :] if match else ".".join(name.split(".")[-2:])
