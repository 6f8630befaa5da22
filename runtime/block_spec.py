"""A block as data: its name, its arguments, which may be blocks themselves, and why it stands for its reference."""

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from pydantic import ConfigDict, Field, TypeAdapter, field_serializer, field_validator, model_validator
from torch import nn as torch_nn

from dayzero.runtime import nn
from dayzero.runtime.record import Record

ProofStatus = Literal["proven", "lifted", "unverified"]


class Proof(Record):
    """Why a block stands for its reference module.

    module: the reference module's path. error: upper bound of the worst relative error over outputs, input gradients
    and parameter gradients, float64. evidence: one line each, what decided the parameters. why: of a lifted one, why no
    block stands for it. computes: of each lifted class in it, in lines, what it was seen to compute.
    """

    status: ProofStatus
    module: str
    error: float | None = None
    evidence: list[str] = Field(default_factory=list)
    why: str = Field(default="", exclude_if=lambda why: not why)
    computes: dict[str, list[str]] = Field(default_factory=dict, exclude_if=lambda computes: not computes)


class BlockSpec(Record):
    """One block of `dayzero.runtime.nn` and the arguments it is built with, checked against its constructor.

    An argument that is a block itself, such as the router of a mixture of experts, or a dict of them, is a BlockSpec
    too; in JSON it is {"block": name, "arguments": {...}}. `Lifted` names its class in the lifted source of the model.
    """

    block: str
    arguments: dict[str, Any]
    proof: Proof | None = None

    @field_validator("arguments", mode="after")
    @classmethod
    def _nested(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        def parsed(value: Any) -> Any:
            if isinstance(value, dict) and {"block", "arguments"} <= value.keys() <= {"block", "arguments", "proof"}:
                return cls.model_validate(value)
            return value

        return {
            name: {key: parsed(held) for key, held in value.items()} if name == "replace" and value else parsed(value)
            for name, value in arguments.items()
        }

    @field_serializer("arguments")
    def _as_data(self, arguments: dict[str, Any]) -> dict[str, Any]:
        def plain(value: Any) -> Any:
            return value.model_dump(exclude={"proof"}) if isinstance(value, BlockSpec) else value

        return {
            name: {key: plain(held) for key, held in value.items()} if name == "replace" and value else plain(value)
            for name, value in arguments.items()
        }

    @model_validator(mode="after")
    def _arguments_fit(self) -> "BlockSpec":
        if self.block not in nn.BLOCKS:
            raise ValueError(f"no block {self.block!r}; there are {', '.join(sorted(nn.BLOCKS))}")
        signature = inspect.signature(nn.BLOCKS[self.block].__init__)
        parameters = {name: p for name, p in signature.parameters.items() if name != "self"}
        if unknown := sorted(self.arguments.keys() - parameters.keys()):
            raise ValueError(f"{self.block} has no argument {', '.join(unknown)}")
        for name, parameter in parameters.items():
            if name in self.arguments:
                self._check(name, parameter.annotation)
            elif parameter.default is inspect.Parameter.empty:
                raise ValueError(f"{self.block} needs the argument {name}")
        return self

    def _check(self, name: str, annotation: Any) -> None:
        value = self.arguments[name]
        if name == "replace" and isinstance(value, dict):
            value = {key: held.block if isinstance(held, BlockSpec) else held for key, held in value.items()}
            annotation = dict[str, str]
        if not isinstance(value, BlockSpec):
            TypeAdapter(annotation, config=ConfigDict(arbitrary_types_allowed=True)).validate_python(value, strict=True)
            return
        kinds = [kind for kind in (annotation, *get_args(annotation)) if isinstance(kind, type)]
        wanted = tuple(kind for kind in kinds if issubclass(kind, torch_nn.Module))
        if not issubclass(nn.BLOCKS[value.block], wanted):
            names = " or ".join(kind.__name__ for kind in wanted) or "no block"
            raise ValueError(f"{self.block}.{name} is {value.block}, expected {names}")

    def build(self, lifted: Mapping[str, type] | None = None):
        """The module itself, parameters uninitialised. lifted: classes of the model's lifted source, by name.

        Raises ValueError for a lifted class that is not among them.
        """

        def built(value: Any) -> Any:
            return value.build(lifted) if isinstance(value, BlockSpec) else value

        arguments: dict[str, Any] = {
            name: {key: built(held) for key, held in value.items()} if name == "replace" and value else built(value)
            for name, value in self.arguments.items()
        }
        if getattr(nn.BLOCKS[self.block], "holds_lifted", False):
            name = arguments["module"]
            if name not in (lifted or {}):
                raise ValueError(f"no lifted class {name!r}; there are {', '.join(sorted(lifted or {})) or 'none'}")
            arguments["module"] = (lifted or {})[name]
        return nn.BLOCKS[self.block](**arguments)

    def walk(self) -> Iterator["BlockSpec"]:
        """This block and every block inside its arguments."""
        yield self
        for value in self.arguments.values():
            for held in value.values() if isinstance(value, dict) else [value]:
                if isinstance(held, BlockSpec):
                    yield from held.walk()
