"""Where an argument of a block comes from, in a form that can be resolved again on another model."""

from collections.abc import Callable, Container, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, overload

import torch
from torch import Tensor, nn

from dayzero.onboard.candidates.stops import Cut, Stop
from dayzero.onboard.oracle.calls import Call
from dayzero.onboard.prove.trace import Operations, trace
from dayzero.onboard.structure.handed import context_of, made_already
from dayzero.onboard.structure.uses import use_of
from dayzero.runtime.nn import Context
from dayzero.runtime.nn.lifted_source import classes_of
from dayzero.runtime.safetensors_reader import TensorsReader
from dayzero.runtime.spec import BlockSpec
from dayzero.runtime.weights import Source, whole

if TYPE_CHECKING:
    from dayzero.onboard.lift.closure import Lift


@dataclass(frozen=True)
class Evidence:
    """label: for the report. resolve(module, config): the value for that module of that model."""

    label: str
    resolve: Callable[[nn.Module, Any], Any] = field(compare=False)


def literal(value: Any, why: str) -> Evidence:
    """A value that no field or shape of the model gives."""
    return Evidence(f"{value!r} ({why})", lambda module, config: value)


def attribute(path: str, name: str) -> Evidence:
    """A scalar attribute of the module, or of the child at `path`."""
    label = f"{path}.{name}" if path else name
    return Evidence(f"attribute {label}", lambda module, config: getattr(module.get_submodule(path), name))


def read_by(module: nn.Module, config: Any) -> Any:
    """The config that the module reads: the model's, unless it was given a copy of its own, which may say otherwise."""
    own = getattr(module, "config", None)
    return own if type(own) is type(config) else config


def config_field(name: str) -> Evidence:
    return Evidence(f"config {name}", lambda module, config: getattr(read_by(module, config), name, None))


def model_field(name: str) -> Evidence:
    """A field as the model reads it, for what the model makes and hands to the module, such as a mask."""
    return Evidence(f"config {name}", lambda module, config: getattr(config, name, None))


def size(parameter: str, dim: int, divide: int = 1) -> Evidence:
    """A dimension of one of the module's parameters, divided."""
    shown = f" / {divide}" if divide != 1 else ""
    return Evidence(
        f"shape of {parameter}[{dim}]{shown}",
        lambda module, config: module.get_parameter(parameter).shape[dim] // divide,
    )


def present(parameter: str) -> Evidence:
    """Whether the module has this parameter."""
    owner, _, name = parameter.rpartition(".")
    return Evidence(
        f"{parameter} is there or not",
        lambda module, config: getattr(module.get_submodule(owner), name, None) is not None,
    )


@overload
def below(path: str, claim: Evidence) -> Evidence: ...
@overload
def below(path: str, claim: "Candidate") -> "Candidate": ...
def below(path: str, claim: "Evidence | Candidate") -> "Evidence | Candidate":
    """A claim about the module at `path` as one about its holder: its evidence is looked up there, its parameters have
    the path before their names."""
    if not path:
        return claim
    if isinstance(claim, Candidate):
        return claim.below(path)
    return Evidence(
        claim.label.replace("attribute ", f"attribute {path}.").replace("shape of ", f"shape of {path}."),
        lambda module, config: claim.resolve(module.get_submodule(path), config),
    )


@dataclass
class Candidate:
    """arguments: of the block's constructor, those that are blocks as candidates themselves. parameters: block
    parameter -> expression over the module's parameters; those of blocks inside are counted among them. when: whether
    there is such a block at all, for one that is inside another."""

    block: str
    arguments: Mapping[str, "Evidence | Candidate"]
    parameters: Mapping[str, Source]
    when: Evidence | None = None

    def __post_init__(self) -> None:
        inner = {
            f"{name}.{parameter}": source
            for name, argument in self.arguments.items()
            if isinstance(argument, Candidate)
            for parameter, source in argument.parameters.items()
        }
        self.parameters = {**self.parameters, **inner}

    def spec(self, module: nn.Module, config: Any) -> BlockSpec:
        """The block for this very module. Raises ValueError if the values do not make one."""
        return BlockSpec(
            block=self.block,
            arguments={name: argument.resolve(module, config) for name, argument in self.arguments.items()},
        )

    def resolve(self, module: nn.Module, config: Any) -> BlockSpec | None:
        """The block as an argument of another: None where `when` says so."""
        if self.when is not None and not self.when.resolve(module, config):
            return None
        return self.spec(module, config)

    @property
    def lifts(self) -> list["Lift"]:
        """Source of the reference that the block consists of, those of blocks inside included; [] for one of ours."""
        return [
            made for argument in self.arguments.values() if isinstance(argument, Candidate) for made in argument.lifts
        ]

    def build(self, module: nn.Module, config: Any) -> nn.Module:
        """The block for this very module, parameters uninitialised. Raises ValueError if the values do not make one."""
        if not self.lifts:
            return self.spec(module, config).build()
        from dayzero.onboard.lift.closure import merge  # parsing source is for those that need it

        return self.spec(module, config).build(classes_of(merge(self.lifts)))

    def below(self, path: str) -> "Candidate":
        """The same claim about the child at `path` of a module, as a claim about that module."""
        arguments = {name: below(path, argument) for name, argument in self.arguments.items()}
        parameters = {name: source.renamed(lambda held: f"{path}.{held}") for name, source in self.parameters.items()}
        return Candidate(self.block, arguments, parameters, below(path, self.when) if self.when else None)

    @property
    def label(self) -> str:
        """All that it claims, in one line."""
        return f"{self.block}({', '.join(self.describe())})"

    def values(self, tensors: Mapping[str, Tensor], names: Container[str] | None = None) -> dict[str, Tensor]:
        """The block's parameters, or those of `names`, made from tensors of the module's parameters (its values, or its
        gradients)."""
        reader = TensorsReader(tensors)
        shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        return {
            name: source.read(reader, shapes, {}, whole(source.shape(shapes, {})))
            for name, source in self.parameters.items()
            if names is None or name in names
        }

    def describe(self) -> list[str]:
        """One line an argument: its name and where its value comes from."""
        lines = [] if self.when is None else [f"there or not from {self.when.label}"]
        for name, argument in self.arguments.items():
            if isinstance(argument, Candidate):
                lines.append(f"{name} is {argument.block}")
                lines += [f"{name}.{line}" for line in argument.describe()]
            else:
                lines.append(f"{name} from {argument.label}")
        return lines

    @property
    def key(self) -> tuple:
        """Equal for equal claims."""
        return (self.block, *sorted(self.describe()), *sorted(map(str, self.parameters.items())))


@dataclass
class Site:
    """One module of the reference as it was called. inner: the calls below it, by path relative to it. stops: None, or
    where proposers leave how far they came. cuts: where they say that they propose no more than so many."""

    call: Call
    inner: dict[str, Call]
    config: Any
    stops: list[Stop] | None = field(default=None, kw_only=True)
    cuts: list[Cut] = field(default_factory=list, kw_only=True)

    @property
    def module(self) -> nn.Module:
        return self.call.module

    @property
    def context(self) -> Context:
        """What our blocks are given beside the hidden input; a fresh one each time, since blocks leave things in it."""
        return replace(self._handed, shared=dict(self._handed.shared))

    @cached_property
    def _handed(self) -> Context:
        return replace(context_of(self.call, self.inner), use=use_of(self.module, self.inner))

    @cached_property
    def usual(self) -> Tensor:
        """What the module gives for the captured input, run once for all candidates."""
        with torch.no_grad():
            return self.call.replay(self.call.hidden)

    @cached_property
    def operations(self) -> Operations:
        """What the module executes on the captured input, but for rotary tables that it makes for itself: those belong
        to the model, and our blocks are handed them."""
        with made_already(self.inner):
            return trace(lambda: self.call.replay(self.call.hidden))

    @cached_property
    def block_lengths(self) -> set[float]:
        """Constants that are numbers of tokens: of an input cut just below one, the length stands in its place."""
        hidden = self.call.hidden
        found = set()
        for value in self.operations.constants:
            if hidden.ndim == 3 and value.is_integer() and 3 <= value <= hidden.shape[1]:
                cut = int(value) - 1
                try:
                    seen = trace(lambda cut=cut: self.call.replay(hidden[:, :cut])).constants
                except (RuntimeError, ValueError, IndexError):  # other arguments are as long as the whole input
                    continue
                if value not in seen and float(cut) in seen:
                    found.add(value)
        return found

    def explain(self, value: float, handed: bool = False) -> list[Evidence]:
        """Every attribute and config field that holds exactly this value, the nearest to the computation first. What is
        `handed` to the module follows from the model's config, whatever config the module has."""
        found: list[Evidence] = []
        for path, module in self.module.named_modules():
            for name, held in sorted(vars(module).items()):
                if not name.startswith("_") and _equal(held, value):
                    found.append(attribute(path, name))
        config, field = (self.config, model_field) if handed else (read_by(self.module, self.config), config_field)
        for name, held in sorted(config.to_dict().items()):
            if _equal(held, value):
                found.append(field(name))
        return found


def _equal(held: Any, value: float) -> bool:
    return isinstance(held, (int, float)) and not isinstance(held, bool) and held == value


def site_of(calls: Mapping[str, Call], path: str, config: Any) -> Site:
    """The site of the module at `path`."""
    prefix = path + "."
    inner = {name.removeprefix(prefix): call for name, call in calls.items() if name.startswith(prefix)}
    return Site(calls[path], inner, config)
