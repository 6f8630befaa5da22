"""From a config to the whole model as data: shrink, observe, propose, prove, compose, find the weight rules.

Everything is settled on a shrunk model of the same kind and then resolved again on the real one, built on the meta
device: arguments from the same attributes and shapes, rules from the same names. Layers of the real model follow the
shrunk layer that has their signature.
"""

from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from pydantic import Field
from torch import nn
from torch.autograd.graph import allow_mutation_on_saved_tensors
from torch.nn.attention import SDPBackend, sdpa_kernel

from dayzero.onboard.candidates import Candidate
from dayzero.onboard.claims import Claim, check_claims, check_idle
from dayzero.onboard.composition import encoder_follows, load_reference, specification_of
from dayzero.onboard.config_fields import IRRELEVANT, RENAMED
from dayzero.onboard.inspect.tensor_names import ranges
from dayzero.onboard.oracle.documents import documents
from dayzero.onboard.oracle.gradients import overwrites
from dayzero.onboard.oracle.reference import (
    UnknownArchitecture,
    build,
    fails_on_text,
    on_disk,
    redraw,
    replaced,
    run,
    text_config,
    text_model,
    text_prefix,
)
from dayzero.onboard.prove.block import TOLERANCE, Attempt, relative_error
from dayzero.onboard.prove.interventions import Intervention, intervene
from dayzero.onboard.prove.model import prove_model
from dayzero.onboard.prove.proven import NotProven, Proven, Unproven
from dayzero.onboard.rules.cuts import cut_as_stored
from dayzero.onboard.rules.on_disk import quantised_rules, with_prefix, with_shared, with_stored_copies
from dayzero.onboard.rules.own_names import as_held, as_read, whichever_is_there
from dayzero.onboard.rules.real_sizes import sizes_between
from dayzero.onboard.rules.search import LeftOver, NoRule, find_rules, full_rules, layer_templates
from dayzero.onboard.rules.settle import numberless
from dayzero.onboard.rules.shared import as_own, as_shared, of_uses, own_shapes, rules_of_uses
from dayzero.onboard.rules.unmapped import Unmapped, unmapped, unmapped_rules
from dayzero.onboard.sharing import shared_sets
from dayzero.onboard.shrink.canonical_config import set_by
from dayzero.onboard.shrink.layers import layer_list
from dayzero.onboard.shrink.shrink import SEQUENCE, NoSmallSizes, shrink_model
from dayzero.onboard.structure.encoder import ENCODER, by_stack
from dayzero.runtime.errors import InputError
from dayzero.runtime.packed import Header, quantised_groups
from dayzero.runtime.spec import CheckpointId, ModelSpec, Record, RuleSpec, SourceSpec
from dayzero.runtime.weights import Source


class Tried(Record):
    """How the block for one reference module was found. candidates: how many were tried; misses: a line for each of the
    others, the nearest first: what it claims that the chosen one does not, and why it was not taken. why: of the
    reference's own code, why no block stands there. bound: of a search that ended before everything was tried, what was
    left."""

    module: str
    block: str
    error: float
    where: str
    candidates: int
    misses: list[str]
    why: str = ""
    bound: str = ""


class Specification(Record):
    """spec: of the real model. shrunk: of the small one, whose config is shrunk_config. tried: one entry a distinct
    block. unread: config fields that nobody explains. interventions: what became of the model when fields changed.
    claims: what fields say that the reference does not compute with, and whether it is so. towers: patterns of the
    tensors that the reference has no use for when it reads text. replaced: what of the reference's own code was
    replaced so that it could be proven against, one line each. contradictions: module of the reference that does not
    compute what it says, and was copied as it is -> what is wrong with it. idle, tables: rules for tensors of the real
    reference of which it does not read all, or that it computes itself. unverified: why there is no reference, "" where
    there is one; without it rules decided (`by_rules`), and shrunk is the real model."""

    spec: ModelSpec
    shrunk: ModelSpec
    shrunk_config: dict[str, Any]
    tried: list[Tried]
    unread: list[str]
    interventions: list[Intervention]
    claims: list[Claim]
    towers: list[str]
    replaced: list[str]
    idle: list[RuleSpec] = Field(default_factory=list)
    tables: list[RuleSpec] = Field(default_factory=list)
    contradictions: dict[str, str] = Field(default_factory=dict)
    unverified: str = ""


def specify(
    config: Mapping[str, Any],
    identity: CheckpointId,
    name: str,
    tell: Callable[[str], None] = lambda line: None,
    headers: Mapping[str, Header] | None = None,
) -> Specification:
    """headers: of the checkpoint's tensors; without them rules are over the reference's names, nothing quantised.

    Raises NotProven with everything that stayed open, InputError where the config itself is wrong.
    """
    try:
        full, _ = build(config, device="meta")
        cut = shrink_model(config, tell)
    except (UnknownArchitecture, NoSmallSizes) as error:
        raise NotProven([Unproven("config.json", str(error))]) from None
    small, follows = cut.config, cut.follows
    tell(f"shrunk to {small_summary(small)}")
    generator = torch.Generator().manual_seed(0)
    reference, reads, ids = _small_reference(small, generator)
    try:
        proven, attempts = prove_model(reference, ids, generator, tell)
    except NotProven as error:
        raise NotProven([_with_layers(item, reference, follows) for item in error.unproven]) from None
    section = text_prefix(reference.config).rstrip(".")
    fields, text = (small[section], config[section]) if section else (small, config)
    reads = (reads | {stored_as(text_config(reference), name) for name in reads}) & fields.keys()
    prefix = f"{section}." if section else ""
    unread = [name for name in unread_fields(text, reads, text_config(reference)) if not set_by(config, prefix + name)]
    # A field of the class that is not read at these values may be read at others, or never: vary it to see.
    dormant = {name for name in unread if name in declared_fields(text_config(reference))}
    interventions = intervene(small, section, reads, dormant, proven, ids, identity, tell)
    inert = {name for item in interventions for name in item.reads}
    idle = {item.field for item in interventions if item.field in dormant and item.effect in {"none", "refused"}}
    unread = [name for name in unread if name not in inert | idle]
    shrunk = specification_of(
        reference, text_config(reference), proven, list(range(len(proven.layers))), identity, name
    )
    shrunk_model = shrunk.build().to(torch.float64)
    load_reference(shrunk_model, reference, proven)
    _prove_composition(shrunk_model, reference, ids)
    try:
        stored = on_disk(reference)
        towers, unused = idle_on_text(reference, ids, proven, stored)
        stored = {name: tensor for name, tensor in stored.items() if name not in towers}
        every = with_shared(reference, stored)
        found, rest = _found(shrunk_model, reference, ids, every, unused)
    except NoRule as error:
        raise NotProven([Unproven("weights", str(error))]) from None
    rules = [RuleSpec(parameter=parameter, source=SourceSpec.of(source)) for parameter, source in found.items()]
    shrunk = shrunk.model_copy(update={"rules": with_stored_copies(rules, stored.keys())})
    try:
        spec = specification_of(full, text_config(full), proven, follows, identity, name)
        with torch.device("meta"):
            shapes = {parameter: tuple(tensor.shape) for parameter, tensor in spec.build().state_dict().items()}
    except ValueError as error:
        found = " ".join(str(error).split())
        raise InputError("config.json", found=found, expected="sizes that the proven blocks can have") from None
    try:
        sizes = sizes_between(small, cut.full)
        sets = shared_sets(full, proven, follows)
        held = own_shapes(by_stack(shapes)[0], sets)
        small_sets = shared_sets(reference, proven, list(range(len(proven.layers))))

        def at_real_size(found: Mapping[str, Source]) -> list[RuleSpec]:
            own = [as_own(stack, small_sets) for stack in by_stack(found)]
            uses = of_uses(own[0])
            templates = [layer_templates({n: s for n, s in stack.items() if n not in uses}) for stack in own]
            rules = full_rules(templates[0], follows, held, sizes)
            rules += rules_of_uses(uses, held, proven, (reference, full), follows, sizes)
            rules = as_shared(rules, sets)
            if proven.encoder is not None:
                theirs = full_rules(templates[1], encoder_follows(full, proven.encoder), by_stack(shapes)[1], sizes)
                rules += [rule.model_copy(update={"parameter": ENCODER + rule.parameter}) for rule in theirs]
            return rules

        rules = at_real_size(found)
        names = set() if headers is None else headers.keys() | quantised_groups(headers).keys()
        if names and not _fits(rules, names):
            rules = as_read(rules, full, names)
        if names and not _fits(rules, names):
            mapped = {n: tensor for n, tensor in as_held(reference, every).items() if n not in rest.files}
            with suppress(NoRule):  # then settling the ledger says what is missing
                others = at_real_size(find_rules(shrunk_model.state_dict(), mapped, unused))
                rules = whichever_is_there(rules, others, names)
        rules = with_stored_copies(rules, ()) if headers is None else _on_disk(rules, headers, shapes)
        spec = spec.model_copy(update={"rules": rules})
        idle_rules, table_rules = (
            _beside(names, reference, full, proven, follows, sizes, headers) for names in (rest.unread, rest.computed)
        )
    except NoRule as error:
        raise NotProven([Unproven("weights", str(error))]) from None
    defaults = text_config(full).to_dict()
    claims, unread = check_claims(unread, text, spec, defaults)
    # Known to the class, without effect: a claim too, unless it is what the class says of every model.
    stated = [name for name in sorted(idle) if text[name] != getattr(type(text_config(reference)), name, text[name])]
    claims += check_idle(stated, text, spec, defaults)
    return Specification(
        spec=spec,
        shrunk=shrunk,
        shrunk_config=small,
        # A module that no block stands for may still have been tried, before what is around it was copied.
        tried=[_tried(path, made) for path, made in attempts.items() if any(attempt.proven for attempt in made)],
        unread=unread,
        interventions=interventions,
        claims=claims,
        towers=sorted({numberless(name) for name in towers}),
        idle=idle_rules,
        tables=table_rules,
        replaced=[*replaced(reference), *filter(None, [fails_on_text(reference), overwrites(reference, ids)])],
        contradictions=proven.contradictions,
    )


def _with_layers(item: Unproven, reference: nn.Module, follows: list[int]) -> Unproven:
    """With the real layers that are like the small model's ones that it is about."""
    listed = layer_list(reference)
    prefix = next(path for path, module in reference.named_modules() if module is listed)
    numbers = {path.removeprefix(f"{prefix}.").split(".")[0] for path in (item.where, *item.also)}
    layers = [layer for layer, shrunk in enumerate(follows) if str(shrunk) in numbers]
    return replace(item, layers=ranges(layers) if layers else "")


def _found(
    ours: nn.Module,
    reference: nn.Module,
    ids: torch.Tensor,
    stored: Mapping[str, torch.Tensor],
    unused: Mapping[str, torch.Tensor],
) -> tuple[dict[str, Source], Unmapped]:
    """The rules, and what the stored tensors are that none of our parameters is made of. Raises NoRule."""
    try:
        return find_rules(ours.state_dict(), stored, unused), Unmapped()
    except LeftOver as error:
        rest = unmapped(error.names, reference, ours, ids)
        mapped = {name: tensor for name, tensor in stored.items() if name not in rest.files}
        return find_rules(ours.state_dict(), mapped, unused), rest


def _beside(
    names: list[str],
    reference: nn.Module,
    full: nn.Module,
    proven: Proven,
    follows: list[int],
    sizes: Mapping[int, int],
    headers: Mapping[str, Header] | None,
) -> list[RuleSpec]:
    """Rules for these tensors of the reference itself, over the checkpoint's own, where it has them. Raises NoRule."""
    rules, shapes = unmapped_rules(names, reference, full, proven.parts.layers, follows, sizes) if names else ([], {})
    with suppress(NoRule):
        return rules if headers is None else _on_disk(rules, headers, shapes)
    return rules


def idle_on_text(
    reference: nn.Module, ids: torch.Tensor, proven: Proven, stored: dict[str, torch.Tensor]
) -> tuple[set[str], dict[str, torch.Tensor]]:
    """The names in `stored`, what transformers writes of the reference, of modules that do not run when it reads text:
    vision and audio towers, but for what blocks were proven with, such as an expert that no token was given to. They
    are written once more as NaN, to see under which names they stand.

    And of tensors that hold something of both, where theirs is: booleans of the tensor's shape."""
    state = reference.state_dict()
    calls = proven.parts.calls
    parents = {path[:dot] for path in calls for dot in range(len(path)) if path[dot] == "."}
    text = next((path for path, module in reference.named_modules() if module is text_model(reference)), "")
    outside = {name for name in state if text and not name.startswith(text + ".")}
    apart = outside | {name for name in state if name.rpartition(".")[0] not in calls.keys() | parents}
    with torch.enable_grad(), allow_mutation_on_saved_tensors():
        run(reference, ids).sum().backward()
    used = {name for name, parameter in reference.named_parameters() if parameter.grad is not None}
    reference.zero_grad()
    idle = {name for name in apart - used - proven.made_of if state[name].is_floating_point()}
    if not idle:
        return set(), {}
    marked = {name: torch.full_like(t, float("nan")) if name in idle else t for name, t in state.items()}
    places = {name: tensor.isnan() for name, tensor in on_disk(reference, marked).items() if name in stored}
    towers = {name for name, place in places.items() if bool(place.all()) and place.numel()}
    return towers, {name: place for name, place in places.items() if name not in towers and bool(place.any())}


def _small_reference(small: Mapping[str, Any], generator: torch.Generator) -> tuple[nn.Module, set[str], torch.Tensor]:
    """The shrunk reference, weights redrawn, the fields it read, and ids that it runs on. Raises NotProven where the
    sizes chosen here are not ones that the architecture can have."""
    try:
        reference, reads = build(small, record=True)
        redraw(reference, generator)
        vocabulary = reference.get_input_embeddings().weight.shape[0]  # type: ignore[operator]
        ids = documents(reference, vocabulary, SEQUENCE, generator)
    except (InputError, RuntimeError, ValueError, TypeError, AttributeError, KeyError, IndexError) as error:
        said = error.found if isinstance(error, InputError) else f"{type(error).__name__}: {error}"
        why = f"the reference does not run at the small sizes of a proof ({' '.join(said.split())[:200]})"
        raise NotProven([Unproven("config.json", why)]) from None
    return reference, reads, ids


def _prove_composition(ours: torch.nn.Module, reference: torch.nn.Module, ids: torch.Tensor) -> None:
    """Proven blocks put together must give the reference's logits. Raises NotProven."""
    bounds = torch.arange(0, ids.numel() + 1, ids.shape[1])
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        error = relative_error(ours(ids.flatten(), bounds).view(*ids.shape, -1), run(reference, ids))
    if not error <= TOLERANCE:
        why = f"every block is proven, but put together they miss the logits by {error:.1e}"
        raise NotProven([Unproven("structure", why)])


def _fits(rules: list[RuleSpec], names: Collection[str]) -> bool:
    """Whether tensors of the rules' names are there, under one prefix or another."""
    try:
        with_prefix(rules, names)
    except NoRule:
        return False
    return True


def _on_disk(
    rules: list[RuleSpec], headers: Mapping[str, Header], shapes: Mapping[str, tuple[int, ...]]
) -> list[RuleSpec]:
    """The rules over the checkpoint's own tensors. Where its names cannot be found, unchanged: settling the ledger says
    which tensor is missing, and from where."""
    groups = quantised_groups(headers)
    names = headers.keys() | groups.keys()
    with suppress(NoRule):
        rules = with_prefix(rules, names)
    rules = cut_as_stored(rules, shapes, {name: tuple(header.shape) for name, header in headers.items()})
    return quantised_rules(with_stored_copies(rules, names), groups)


def _tried(path: str, attempts: list[Attempt]) -> Tried:
    best = next(attempt for attempt in attempts if attempt.proven)
    failed = [attempt for attempt in attempts if not attempt.proven]
    failed.sort(key=lambda attempt: (not attempt.thorough, attempt.error))
    rivals = [attempt for attempt in attempts if attempt.proven and attempt is not best]
    misses = [f"{_difference(attempt.candidate, best.candidate)}: holds as well" for attempt in rivals]
    misses += [f"{_difference(attempt.candidate, best.candidate)}: {attempt.objection}" for attempt in failed]
    return Tried(
        module=path,
        block=best.candidate.block,
        error=best.error,
        where=best.where,
        candidates=len(attempts),
        misses=misses,
        why=best.why,
        bound=best.bound,
    )


def _difference(candidate: Candidate, best: Candidate) -> str:
    """What the candidate claims that the best one does not."""
    if candidate.block != best.block:
        return candidate.block
    claims = [
        f"{name} from {evidence.label}"
        for name, evidence in candidate.arguments.items()
        if name not in best.arguments or best.arguments[name].label != evidence.label
    ]
    claims += [
        f"{name} is {source}" for name, source in candidate.parameters.items() if best.parameters.get(name) != source
    ]
    return f"{candidate.block} with {', '.join(claims)}"


def small_summary(small: Mapping[str, Any]) -> str:
    """The shrunk sizes in one line."""
    sizes = [f"{name}={value}" for name, value in small.items() if name.startswith(("num_", "hidden_size", "vocab"))]
    return ", ".join(sizes)


def stored_as(loaded: Any, name: str) -> str:
    """The field behind an alias of the config's class (`num_experts` may be stored as `num_local_experts`)."""
    return (getattr(type(loaded), "attribute_map", None) or {}).get(name, name)


def declared_fields(loaded: Any) -> set[str]:
    """Fields that the config's class knows by name, aliases included."""
    names = {name for cls in type(loaded).__mro__ for name in getattr(cls, "__annotations__", {})}
    return names | set(getattr(type(loaded), "attribute_map", {}) or {})


def unread_fields(config: Mapping[str, Any], reads: set[str], loaded: Any) -> list[str]:
    """Fields of config.json that the reference did not read and that are not known to be irrelevant."""
    known = reads | {name for name in config if stored_as(loaded, name) in reads}
    unread = [name for name in config if name not in known and name not in IRRELEVANT]
    return sorted(name for name in unread if RENAMED.get(name) not in known and name != "quantization_config")
