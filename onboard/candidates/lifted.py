"""The candidate of last resort: the reference's own code, copied (`onboard.lift`) and handed what it was handed.

Its claim is small, that the copy and what it is rebuilt from compute what the module computed; it is proven like any
other. Settings are the constructor's arguments, of configs only the fields that the copy reads.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.evidence import Candidate, Evidence, Site, literal
from dayzero.onboard.candidates.lifted_call import handed_values, resolver, shown, without_mask
from dayzero.onboard.candidates.lifted_settings import Reads
from dayzero.onboard.lift.closure import Lift, LiftError, lift, merge
from dayzero.onboard.oracle.constructed import constructed_with
from dayzero.onboard.oracle.training_modes import undecided
from dayzero.onboard.structure.token_mixing import mixes_tokens
from dayzero.runtime.nn.lifted import Lifted
from dayzero.runtime.nn.lifted_source import classes_of
from dayzero.runtime.weights import Stored


@dataclass
class LiftedCandidate(Candidate):
    """A lifted class. reads_tables: whether it is handed rotary tables. replace: path of a module inside -> the block
    of ours that stands there. at: path of its module in the one that the claim is about."""

    lift: Lift | None = None
    reads_tables: bool = False
    replace: dict[str, Candidate] = field(default_factory=dict)
    at: str = ""

    @property
    def lifts(self) -> list[Lift]:
        return [*([self.lift] if self.lift else []), *(made for c in self.replace.values() for made in c.lifts)]

    def below(self, path: str) -> "Candidate":
        plain = super().below(path)
        replace = {name: candidate.below(path) for name, candidate in self.replace.items()}
        claim = (plain.block, plain.arguments, plain.parameters, plain.when)
        return LiftedCandidate(*claim, self.lift, self.reads_tables, replace, f"{path}.{self.at}".strip("."))

    def describe(self) -> list[str]:
        inside = [f"{path}: {line}" for path, made in self.replace.items() for line in (made.block, *made.describe())]
        files = {definition.file: definition.lines for definition in self.lift.definitions} if self.lift else {}
        return [*(f"copied from {file}" for file in files), *super().describe(), *inside]


def propose_lifted(site: Site, replace: Mapping[str, Candidate] | None = None) -> list[Candidate]:
    """The module's own class, called once with all documents or a document at a time, whichever is enough.

    replace: path of a module inside -> the proven candidate for that module. [] where the class cannot stand by itself;
    `why_not` says why.
    """
    try:
        return lifted_candidates(site, replace or {})
    except LiftError:
        return []


def why_not(site: Site, replace: Mapping[str, Candidate] | None = None) -> str:
    """Why the module cannot be lifted, "" where it can."""
    try:
        lifted_candidates(site, replace or {})
    except LiftError as error:
        return str(error)
    return ""


def lifted_candidates(site: Site, replace: Mapping[str, Candidate]) -> list[Candidate]:
    """As `propose_lifted`. Raises LiftError."""
    if undecided(site.module):  # what gradients must pass through is seen in a call that wants them
        with torch.enable_grad():
            site.call.replay(site.call.hidden.clone().requires_grad_(True))
    made = lift(type(site.module), frozenset(path for path in replace if "." not in path))
    cls = classes_of(merge([made]))[made.name]
    if constructed_with(site.module) is None:
        raise LiftError(f"how {type(site.module).__name__} was constructed is not known")
    _check_members(site.module, cls)
    named, others = handed_values(site, cls)
    reads = Reads(cls, made)
    parameters = _parameters(site.module, replace)
    found: list[Candidate] = []
    # One call for all documents only where a token depends on no other: the captured batch is one document.
    for together in (True, False) if not mixes_tokens(site.call) else (False,):
        for handed in [named] + ([{**named, **others}] if others else []):
            described = {name: without_mask(what) if together else what for name, what in handed.items()}
            found.append(
                LiftedCandidate(
                    "Lifted",
                    {
                        "module": literal(made.name, f"the class of {site.call.path}"),
                        "settings": Evidence("arguments of its constructor", reads.settings),
                        "handed": Evidence(f"values of the captured call: {shown(described)}", resolver(described)),
                        "tables": literal(list(range(len(site.context.tables))), "tables of the captured call"),
                        "together": literal(together, "enumerated"),
                        "flat": literal(site.call.hidden.ndim == 2, "dimensions of the input"),
                        "replace": Evidence("proven blocks", _inside(site, dict(replace))),
                    },
                    dict(parameters),
                    None,
                    made,
                    "'table'" in repr(described),
                    dict(replace),
                )
            )
    try:
        reads.construct(constructed_with(site.module) or {})
        _read_in_a_call(found[-1], cls, site, reads)
    except ValueError as error:
        raise LiftError(str(error)) from None
    return found


def _check_members(module: nn.Module, cls: type[nn.Module]) -> None:
    """Raises LiftError where the module holds a tensor that its constructor does not make."""
    with torch.device("meta"):
        try:
            made = cls(**(constructed_with(module) or {}))
        except Exception as error:  # whatever copied code raises
            said = " ".join(str(error).split())[:200]
            raise LiftError(f"{cls.__name__} cannot be constructed ({type(error).__name__}: {said})") from None
    ours = {name for name, _ in (*made.named_parameters(), *made.named_buffers())}
    theirs = [name for name, _ in (*module.named_parameters(), *module.named_buffers())]
    if missing := [name for name in theirs if name not in ours and "." not in name]:
        raise LiftError(f"{cls.__name__} is given {missing[0]} by another class")


def _parameters(module: nn.Module, replace: Mapping[str, Candidate]) -> dict[str, Any]:
    """Each tensor of the module under its own name; those of replaced modules as their blocks are made of them."""
    inside = tuple(f"{path}." for path in replace)
    saved = [name for name in module.state_dict() if not name.startswith(inside)]
    shown = dict(module.named_parameters(remove_duplicate=True)) | dict(module.named_buffers())
    parameters: dict[str, Any] = {f"module.{name}": Stored(name) for name in saved if name in shown}
    for path, candidate in replace.items():
        for name, source in candidate.below(path).parameters.items():
            parameters[f"module.{path}.block.{name}"] = source
    return parameters


def _inside(site: Site, replace: dict[str, Candidate]) -> Callable[[nn.Module, Any], Any]:
    """The blocks in place of modules inside, and in which place of a tuple their modules gave their result."""
    returns = {path: _returns(site.inner[path].output) if path in site.inner else None for path in replace}

    def resolve(module: nn.Module, config: Any) -> Any:
        return {
            path: {
                "block": "Inside",
                "arguments": {
                    "block": candidate.spec(module.get_submodule(path), config).model_dump(exclude={"proof"}),
                    "returns": returns[path],
                },
            }
            for path, candidate in replace.items()
        }

    return resolve


def _returns(output: Any) -> list[int] | None:
    if not isinstance(output, (tuple, list)):
        return None
    place = next(i for i, value in enumerate(output) if isinstance(value, Tensor) and value.is_floating_point())
    return [len(output), place]


def _read_in_a_call(candidate: Candidate, cls: type[nn.Module], site: Site, reads: Reads) -> None:
    """Calls the copy on the captured input with probes for configs. Raises LiftError where what it reads cannot be
    plain data."""
    from dayzero.onboard.prove.block import block_function  # which proposes candidates itself

    spec = candidate.spec(site.module, site.config)
    classes, arguments = classes_of(merge(candidate.lifts)), constructed_with(site.module) or {}
    inside = {path: held.build(classes) for path, held in (spec.arguments["replace"] or {}).items()}
    given = {name: spec.arguments[name] for name in ("handed", "tables", "together", "flat")}
    block = Lifted(cls, reads.probes(arguments, reads.names), replace=inside, **given).to(torch.float64)
    for names in reads.names.values():
        names.clear()  # what is read in constructing is seen for each module anew
    with torch.no_grad():
        for tensor in block.state_dict().values():
            tensor.zero_()
        try:
            block_function(site, block)(site.call.hidden)
        except LiftError:
            raise
        except Exception:  # what does not run on zeros is tried on its weights by the prover
            return
