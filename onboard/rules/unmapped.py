"""Stored tensors that the text decoder of the reference holds and that no parameter of ours is made of.

Two kinds are explained here. Some are never read: a reference may hold rows for experts that compute nothing, and save
them. Others it computes itself, in a constructor, and saves as buffers: ours computes what they are for in its own way.
Both are carried through as they are; of the computed ones L0 sees to it that the stored values are those that the
constructor gives, since the reference would compute with others and ours would not.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from dayzero.onboard.inspect.ledger import Fate
from dayzero.onboard.oracle.reference import is_computed, on_disk, run
from dayzero.onboard.oracle.router_choices import router_choices
from dayzero.onboard.oracle.top_k import ForceTopK, NoteTopK
from dayzero.onboard.rules.expressions import NoRule, StoredValues, express
from dayzero.onboard.rules.search import LeftOver, full_rules, layer_templates
from dayzero.runtime.spec import RuleSpec
from dayzero.runtime.weights import bind

NEVER_READ = "the reference holds it and never reads it"
COMPUTED = "the model computes what it holds; L0 compares"


@dataclass
class Unmapped:
    """Names of the reference's own tensors. unread: of which some values are never read; files: their tensors, as they
    are saved. computed: the buffers that its constructor computes, of every module of which one is not mapped."""

    unread: list[str] = field(default_factory=list)
    computed: list[str] = field(default_factory=list)
    files: set[str] = field(default_factory=set)


def unmapped(names: Collection[str], reference: nn.Module, ours: nn.Module, ids: Tensor) -> Unmapped:
    """What the tensors of these names are, as the reference saves them, of which no parameter of ours is made.

    Raises NoRule for one that the reference reads, or may read, and does not compute.
    """
    places = _places(reference, names)
    computed = {name for name in places if is_computed(reference, name)}
    unread = {name: place for name, place in places.items() if name not in computed}
    if unread and _reads(reference, ours, ids, unread):
        raise LeftOver(sorted(names))
    owners = {name.rpartition(".")[0] for name in computed}
    beside = [name for name in reference.state_dict() if name.rpartition(".")[0] in owners]
    return Unmapped(sorted(unread), [name for name in beside if is_computed(reference, name)], set(names))


def _numbered(reference: nn.Module) -> dict[str, Tensor]:
    """The reference's tensors with a number of its own for every value, from 1 on."""
    state = {name: tensor for name, tensor in reference.state_dict().items() if tensor.is_floating_point()}
    numbers = torch.arange(1, 1 + sum(tensor.numel() for tensor in state.values()), dtype=torch.float64)
    parts = numbers.split([tensor.numel() for tensor in state.values()])
    return {name: part.view(tensor.shape) for (name, tensor), part in zip(state.items(), parts, strict=True)}


def _places(reference: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Which values of which tensors of the reference stand under these names in its files: booleans of their shape."""
    numbered = _numbered(reference)
    written = on_disk(reference, {**reference.state_dict(), **numbered})
    if missing := sorted(names - written.keys()):
        raise NoRule(f"no parameter is made of {missing[0]}, which the reference holds more than once")
    found = torch.cat([written[name].flatten() for name in names])
    places = {name: torch.isin(numbers, found) for name, numbers in numbered.items()}
    return {name: place for name, place in places.items() if bool(place.any())}


def _reads(reference: nn.Module, ours: nn.Module, ids: Tensor, places: Mapping[str, Tensor]) -> bool:
    """Whether the logits show anything of these values: all are made NaN, which leaves no result as it was.

    Asked as tokens are routed by themselves, and with every class of every router given to some token, so that a value
    is not missed because nobody chose its expert.
    """
    like = router_choices(ours)
    noted = NoteTopK()
    with torch.no_grad(), noted:
        run(reference, ids)
    routed = [pair for pair in noted.seen if pair in like]
    turns = [_in_turn(ids.numel(), classes, top_k) for classes, top_k in routed]
    if any(choice.unique().numel() < classes for choice, (classes, _) in zip(turns, routed, strict=True)):
        return True

    def results() -> Iterator[Tensor]:
        for force in (nullcontext(), ForceTopK(turns, like)):
            with torch.no_grad(), force:
                yield run(reference, ids)

    before = list(results())
    state = reference.state_dict()
    kept = {name: state[name].clone() for name in places}
    with torch.no_grad():
        for name, place in places.items():
            state[name][place] = float("nan")
        after = list(results())
        for name, tensor in kept.items():
            state[name].copy_(tensor)
    finite = all(bool(logits.isfinite().all()) for logits in before)
    return not finite or not all(map(torch.equal, before, after))


def _in_turn(tokens: int, classes: int, top_k: int) -> Tensor:
    """[tokens, top_k]: all classes one after the other, again and again."""
    return (torch.arange(tokens * top_k) % classes).view(tokens, top_k)


def unmapped_rules(
    names: Sequence[str],
    reference: nn.Module,
    full: nn.Module,
    layers: str,
    follows: list[int],
    sizes: Mapping[int, int],
) -> tuple[list[RuleSpec], dict[str, tuple[int, ...]]]:
    """Rules for tensors of the real reference `full`, over the files that it would save, and the shapes of its tensors.

    names: of the small reference's; layers: path of the list of layers, of which the i-th is like the small one's
    follows[i]. Raises NoRule where they are not made of what is saved.
    """
    numbered = _numbered(reference)
    stored = StoredValues(on_disk(reference, {**reference.state_dict(), **numbered}))
    found = {_ours(name, layers): express(numbered[name], stored) for name in names}
    outside, inside = layer_templates(found)
    inside = {layer: inside.get(layer, {}) for layer in range(max([*follows, *inside], default=0) + 1)}
    shapes = {_ours(name, layers): tuple(tensor.shape) for name, tensor in full.state_dict().items()}
    rules = full_rules((outside, inside), follows, shapes, sizes)
    return (
        [rule.model_copy(update={"parameter": _theirs(rule.parameter, layers)}) for rule in rules],
        {_theirs(name, layers): shape for name, shape in shapes.items()},
    )


def _ours(name: str, layers: str) -> str:
    """The name as a parameter of ours would have it: `layers.3.` for the path of the third layer."""
    return f"layers.{name.removeprefix(f'{layers}.')}" if name.startswith(f"{layers}.") else f"outside.{name}"


def _theirs(name: str, layers: str) -> str:
    return f"{layers}.{name.removeprefix('layers.')}" if name.startswith("layers.") else name.removeprefix("outside.")


def fates(unread: Sequence[RuleSpec], computed: Sequence[RuleSpec]) -> Mapping[str, tuple[Fate, str]]:
    """Name of a stored tensor -> its fate, and why; those that a parameter is made of are among them."""
    carried: tuple[Fate, str] = "carried", NEVER_READ
    derived: tuple[Fate, str] = "derived", COMPUTED
    return dict.fromkeys(_names(unread), carried) | dict.fromkeys(_names(computed), derived)


def _names(rules: Sequence[RuleSpec]) -> Iterator[str]:
    for rule in bind([rule.build() for rule in rules]).values():
        yield from rule.names()
