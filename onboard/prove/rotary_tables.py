"""The rotary tables of a model, each with the formula that gives it, and which of them a block reads."""

import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from dayzero.onboard.candidates import Candidate
from dayzero.onboard.candidates.lifted import LiftedCandidate
from dayzero.onboard.candidates.rotary import ProposedRotary, propose_rotaries
from dayzero.onboard.oracle.calls import Call
from dayzero.onboard.structure.handed import Table, handed_tables
from dayzero.runtime.nn import BLOCKS
from dayzero.runtime.spec import BlockSpec


@dataclass
class ProvenRotary:
    """A formula that gives tables of the model, and the module of the reference that makes them."""

    path: str
    candidate: Candidate


class Rotaries:
    """The tables that layers are handed or make. without: modules whose tables no formula gives."""

    def __init__(self, calls: Mapping[str, Call], config: Any):
        self.calls = calls
        self.found, self.open = propose_rotaries(calls, config)
        self.used: list[ProposedRotary] = []
        self.without: list[str] = []

    @property
    def proven(self) -> list[ProvenRotary]:
        return [ProvenRotary(rotary.path, rotary.candidate) for rotary in self.used]

    def indices(self, call: Call) -> list[int]:
        """Which of the model's tables each one is that the call was handed, in the order of its `Context.tables`."""
        prefix = call.path + "."
        inner = {path: made for path, made in self.calls.items() if path.startswith(prefix)}
        return [self._index(table) for table in handed_tables(call, inner)]

    def _index(self, table: Table) -> int:
        rotary = next((item for item in self.found if item.gives(table)), None)
        if rotary is None:
            self.without.append((self.open or ["rotary"])[0])
            return 0
        if rotary not in self.used:
            self.used.append(rotary)
        return self.used.index(rotary)


def uses_tables(candidate: Candidate) -> bool:
    """Whether the block, or one inside it, reads rotary tables."""
    if isinstance(candidate, LiftedCandidate):
        return candidate.reads_tables or any(map(uses_tables, candidate.replace.values()))
    inner = [argument for argument in candidate.arguments.values() if isinstance(argument, Candidate)]
    return "table" in _arguments(candidate.block) or any(map(uses_tables, inner))


def with_tables(block: BlockSpec, tables: list[int]) -> BlockSpec:
    """The block and those inside it, reading the model's rotary tables instead of the ones it was handed."""

    def renamed(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: renamed(held) for name, held in value.items()}
        return with_tables(value, tables) if isinstance(value, BlockSpec) else value

    arguments = {name: renamed(value) for name, value in block.arguments.items()}
    if tables and block.block == "Lifted":
        arguments["tables"] = [tables[number] for number in arguments["tables"]]
    if tables and "table" in _arguments(block.block):
        arguments["table"] = tables[arguments.get("table", 0)]
    return block.model_copy(update={"arguments": arguments})


def _arguments(block: str) -> Collection[str]:
    """Names of the arguments of a block's constructor."""
    return inspect.signature(BLOCKS[block].__init__).parameters
