"""Numbers in the names of stored tensors that follow from the layer: its own number, or one that counts only the layers
that have such a tensor (queries of all layers but the first, say, numbered from zero)."""

import itertools
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from dayzero.onboard.rules.expressions import NUMBER, NoRule
from dayzero.runtime.weights.names import following

_NTH = re.compile(r"\{nth(\+1)?\}")  # which of the layers that have such a tensor, counted from 0 or from 1


def numbered(names: Mapping[str, int], parameters: Mapping[str, str]) -> dict[str, str]:
    """Every stored name with a placeholder for the number that its layer gives it.

    names: stored name -> layer. parameters: stored name -> what it makes, for the message. The placeholder is `{layer}`
    where a number of the name is the layer's; otherwise `{nth}` or `{nth+1}`, which `at_layers` resolves; otherwise
    `{layer-2}` or such, where the difference is the same for all. Raises NoRule for a name without any.
    """
    made, others = {}, []
    for name, layer in names.items():
        hits = [hit for hit in NUMBER.finditer(name) if int(hit.group()) == layer]
        if hits:
            made[name] = name[: hits[0].start()] + "{layer}" + name[hits[0].end() :]
        else:
            others.append(name)
    if not others:
        return made
    families: dict[str, dict[int, tuple[int, str]]] = defaultdict(dict)  # name with a hole -> number -> (layer, name)
    for name, layer in names.items():
        for hit in NUMBER.finditer(name):
            families[f"{name[: hit.start()]}\0{name[hit.end() :]}"][int(hit.group())] = (layer, name)
    for name in others:
        holes = [f"{name[: hit.start()]}\0{name[hit.end() :]}" for hit in NUMBER.finditer(name)]
        for hole in sorted(holes, key=lambda hole: -len(families[hole])):
            if place := _counting({layer: number for number, (layer, _) in sorted(families[hole].items())}):
                made |= {member: hole.replace("\0", place) for _, member in families[hole].values()}
                break
        else:
            raise NoRule(f"{parameters[name]} is made of {name}, which does not hold the layer's number {names[name]}")
    return made


def _counting(number_of: Mapping[int, int]) -> str | None:
    """The placeholder for the numbers of these layers, given in the order of the numbers; None where there is none."""
    layers, numbers = list(number_of), list(number_of.values())
    if layers != sorted(layers):
        return None
    for first, place in ((0, "{nth}"), (1, "{nth+1}")):
        if numbers == list(range(first, first + len(numbers))):
            return place
    offsets = {layer - number for layer, number in number_of.items()}
    return following("layer", offsets.pop()) if len(offsets) == 1 < len(layers) else None


def at_layers(templates: Sequence[Iterable[str]]) -> dict[tuple[str, int], str]:
    """(template, layer) -> the template with the n-th layer said by the layer's number.

    templates: for each layer of the model, the templates of its tensors. The n-th of layers at even distances is
    `{(layer-1)/2}`; at others the difference holds for some layers only.
    """
    layers_of: dict[str, list[int]] = defaultdict(list)
    for layer, theirs in enumerate(templates):
        for template in set(theirs):
            if _NTH.search(template):
                layers_of[template].append(layer)
    made = {}
    for template, layers in layers_of.items():
        gaps = {after - before for before, after in itertools.pairwise(layers)}
        step = gaps.pop() if len(gaps) == 1 else 1
        for nth, layer in enumerate(layers):

            def place(match: re.Match, nth=nth, layer=layer, step=step) -> str:
                return following("layer", layer - step * (nth + (1 if match[1] else 0)), step)

            made[template, layer] = _NTH.sub(place, template)
    return made
