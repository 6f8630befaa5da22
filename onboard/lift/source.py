"""The file that a class of the reference comes from: its statements, its imports, its licence."""

import ast
import functools
import inspect
import sys
import textwrap
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dayzero.onboard.oracle.remote_code import CHECKPOINT_PACKAGE


class LiftError(Exception):
    """A class that cannot stand by itself. The message names what it needs and why that cannot be given."""


@dataclass(eq=False)
class Source:
    """A module's file. label: its path as shown, no folder of this machine in it. statements: name -> the top-level
    statement that defines it. bound: name -> (module, name in it) that an import binds it to."""

    module: types.ModuleType
    label: str
    text: str
    licence: str
    statements: dict[str, ast.stmt] = field(default_factory=dict)
    bound: dict[str, tuple[str, str | None]] = field(default_factory=dict)

    def __hash__(self) -> int:
        return hash(self.label)

    @functools.cached_property
    def attributes(self) -> frozenset[str]:
        """Names that anything in this file but whole models reads as an attribute: methods called from outside."""
        found: set[str] = set()
        for name, statement in self.statements.items():
            made = vars(self.module).get(name)
            if not (isinstance(made, type) and any(base.__name__ == "PreTrainedModel" for base in made.__mro__)):
                found |= {node.attr for node in ast.walk(statement) if isinstance(node, ast.Attribute)}
        return frozenset(found)

    def segment(self, statement: ast.stmt) -> tuple[str, tuple[int, int]]:
        """The statement's text, decorators included, and its lines."""
        decorators = getattr(statement, "decorator_list", [])
        first = min([statement.lineno, *(decorator.lineno for decorator in decorators)])
        last = statement.end_lineno or first
        return textwrap.dedent("\n".join(self.text.splitlines()[first - 1 : last]) + "\n"), (first, last)


def module_of(thing: Any) -> types.ModuleType:
    module = sys.modules.get(getattr(thing, "__module__", None) or "")
    if module is None:
        raise LiftError(f"{getattr(thing, '__qualname__', thing)!r} belongs to no module")
    return module


@functools.cache
def source_of(module: types.ModuleType) -> Source:
    file = getattr(module, "__file__", None)
    if not file or not file.endswith(".py"):
        raise LiftError(f"the module {module.__name__} has no Python source")
    text = Path(file).read_text(encoding="utf-8")
    source = Source(module, _label(module), text, _licence(text))
    for statement in _top_level(ast.parse(text).body):
        for name in defined(statement):
            if name not in source.statements or _is_the_one(vars(module).get(name), statement):
                source.statements[name] = statement
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound = alias.asname or alias.name.split(".")[0]
                source.bound[bound] = (alias.name if alias.asname else bound, None)
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(module, node)
            for alias in node.names:
                source.bound[alias.asname or alias.name] = (base, alias.name)
    return source


def _top_level(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """The statements of a file, those under a condition included."""
    for statement in body:
        if isinstance(statement, ast.If):
            yield from _top_level([*statement.body, *statement.orelse])
        elif isinstance(statement, ast.Try):
            handlers = [line for handler in statement.handlers for line in handler.body]
            yield from _top_level([*statement.body, *handlers, *statement.orelse, *statement.finalbody])
        else:
            yield statement


def _is_the_one(value: Any, statement: ast.stmt) -> bool:
    """Whether this definition, of several under one name, is the one that was executed."""
    code = getattr(inspect.unwrap(value), "__code__", None) if callable(value) else None
    if code is None and isinstance(value, type):
        code = next((f.__code__ for f in vars(value).values() if inspect.isfunction(f)), None)
    return code is not None and statement.lineno <= code.co_firstlineno <= (statement.end_lineno or 0)


def _label(module: types.ModuleType) -> str:
    """The file as shown: below the package for an installed one, its name alone for one that came along."""
    root = module.__name__.split(".")[0]
    top = sys.modules.get(root)
    folder = Path(next(iter(getattr(top, "__path__", [])), "/nowhere"))
    file = Path(module.__file__ or "")
    if root.startswith(CHECKPOINT_PACKAGE):
        return file.relative_to(folder).as_posix()
    if file.is_relative_to(folder) and not root.startswith("dayzero"):
        return str(Path(root, file.relative_to(folder)))
    return file.name


def _absolute(module: types.ModuleType, node: ast.ImportFrom) -> str:
    if not node.level:
        return node.module or ""
    package = (module.__package__ or "").split(".")
    base = package[: len(package) - node.level + 1]
    return ".".join([*base, *([node.module] if node.module else [])])


def _licence(text: str) -> str:
    """The comment lines at the head of a file from the copyright on; all of them where none says copyright."""
    lines: list[str] = []
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            break
        lines.append(line.rstrip())
    start = next((number for number, line in enumerate(lines) if "copyright" in line.lower()), 0)
    return "\n".join(line for line in lines[start:] if not line.startswith(("#!", "# coding", "# -*-"))).strip()


def defined(statement: ast.stmt) -> Iterator[str]:
    if isinstance(statement, (ast.ClassDef, ast.FunctionDef)):
        yield statement.name
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            names = target.elts if isinstance(target, (ast.Tuple, ast.List)) else [target]
            yield from (name.id for name in names if isinstance(name, ast.Name))
    elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
        yield statement.target.id
