"""Makes a copied class or function fit to stand by itself: what serves caches, generation, documentation and dispatch
goes, arithmetic stays; what only caches decide is folded (`folding`).
"""

import ast
import textwrap
from collections.abc import Collection
from typing import Any

import libcst as cst

from dayzero.onboard.lift.folding import Assigned, Known, dotted, fold_functions


def clean(
    text: str,
    known: Known,
    called: Collection[str],
    replaced: Collection[str] = (),
    name: str | None = None,
    trained: Collection[str] = (),
) -> str:
    """The statement's text, cleaned.

    called: attributes that the rest of the file reads: methods of these names are kept. replaced: attributes of a class
    that are set to None where they are made. name: the new name of the class, if it gets one. trained: methods whose
    `no_grad` decorator goes: gradients pass through them.
    """
    module = cst.parse_module(text)
    original = next((line.name.value for line in module.body if isinstance(line, cst.ClassDef)), "")
    module = module.visit(_Surface(known, trained))
    module = fold_functions(module, known)
    if replaced:
        module = module.visit(_Replace(frozenset(replaced)))
    if name is not None:
        module = module.visit(_Rename(name))
    module = _without_idle_members(module, called, known, original)
    return module.code


class _Surface(cst.CSTTransformer):
    """Decorators, annotations and log messages."""

    def __init__(self, known: Known, trained: Collection[str] = ()):
        super().__init__()
        self.known, self.trained = known, trained
        self.functions: list[str] = []

    def visit_FunctionDef(self, node):
        self.functions.append(node.name.value)

    def leave_Decorator(self, original_node, updated_node):
        node = updated_node.decorator
        root = dotted(node.func if isinstance(node, cst.Call) else node)
        if root.split(".")[-1] == "no_grad" and self.functions and self.functions[-1] in self.trained:
            return cst.RemoveFromParent()
        return cst.RemoveFromParent() if self.known.droppable(root.split(".")[0]) else updated_node

    def leave_Param(self, original_node, updated_node):
        return updated_node.with_changes(annotation=self._annotation(updated_node.annotation))

    def leave_FunctionDef(self, original_node, updated_node):
        self.functions.pop()
        return updated_node.with_changes(returns=self._annotation(updated_node.returns))

    def leave_AnnAssign(self, original_node, updated_node):
        if self._annotation(updated_node.annotation) is not None:
            return updated_node
        if updated_node.value is None:
            return cst.RemoveFromParent()
        return cst.Assign([cst.AssignTarget(updated_node.target)], updated_node.value)

    def _annotation(self, annotation: cst.Annotation | None) -> cst.Annotation | None:
        if annotation is None:
            return None
        text = cst.Module([]).code_for_node(annotation.annotation)
        names = {node.id for node in ast.walk(ast.parse(text, mode="eval")) if isinstance(node, ast.Name)}
        quoted = any(
            isinstance(node, ast.Constant) and isinstance(node.value, str)
            for node in ast.walk(ast.parse(text, mode="eval"))
        )
        return annotation if not quoted and all(map(self.known.allowed, names)) else None

    def leave_SimpleStatementLine(self, original_node, updated_node):
        kept = [part for part in updated_node.body if not self._logs(part)]
        if len(kept) == len(updated_node.body):
            return updated_node
        if kept:
            return updated_node.with_changes(body=kept)
        return cst.SimpleStatementLine([cst.Pass()])

    def _logs(self, part: cst.BaseSmallStatement) -> bool:
        if not isinstance(part, cst.Expr) or not isinstance(part.value, cst.Call):
            return False
        name = dotted(part.value.func)
        return "." in name and self.known.is_logger(name.split(".")[0])


class _Replace(cst.CSTTransformer):
    """`self.NAME = ...` becomes None where the caller puts a module in its place."""

    def __init__(self, names: frozenset[str]):
        super().__init__()
        self.names = names

    def leave_Assign(self, original_node, updated_node):
        if len(updated_node.targets) == 1:
            name = dotted(updated_node.targets[0].target)
            if name.startswith("self.") and name.removeprefix("self.") in self.names:
                return updated_node.with_changes(value=cst.Name("None"))
        return updated_node


class _Rename(cst.CSTTransformer):
    """Gives the text's class another name, inside itself too."""

    def __init__(self, name: str):
        super().__init__()
        self.name, self.old, self.depth = name, "", 0

    def visit_ClassDef(self, node: cst.ClassDef) -> None:
        self.old = self.old or node.name.value

    def leave_Name(self, original_node, updated_node):
        return updated_node.with_changes(value=self.name) if updated_node.value == self.old else updated_node


def _without_idle_members(module: cst.Module, called: Collection[str], known: Known, original: str) -> cst.Module:
    """Class members that nothing reads are left out: methods of generation, flags of the library."""
    body: list[Any] = []
    for statement in module.body:
        if isinstance(statement, cst.ClassDef) and known.is_module(original):
            statement = _trimmed(statement, called)
        body.append(statement)
    return module.with_changes(body=body)


def _trimmed(statement: cst.ClassDef, called: Collection[str]) -> cst.ClassDef:
    members = list(statement.body.body)
    texts = [cst.Module([]).code_for_node(member) for member in members]
    names = [_member_names(member) for member in members]
    wanted = {"__init__", "forward"}
    while True:
        reads = set(called)
        for text, held in zip(texts, names, strict=True):
            if not held or held & wanted or any(_always(name) for name in held):
                reads |= _attributes(text)
        grown = wanted | {name for held in names for name in held if name in reads}
        if grown == wanted:
            break
        wanted = grown
    kept = [
        member
        for member, held in zip(members, names, strict=True)
        if not held or held & wanted or any(_always(name) for name in held)
    ]
    return statement.with_changes(
        body=statement.body.with_changes(body=kept or [cst.SimpleStatementLine([cst.Pass()])])
    )


def _always(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def _member_names(member: cst.CSTNode) -> set[str]:
    """Names that a statement of a class body binds; none for a docstring and the like."""
    if isinstance(member, (cst.FunctionDef, cst.ClassDef)):
        return {member.name.value}
    found = Assigned()
    member.visit(found)
    return set(found.values)


def _attributes(text: str) -> set[str]:
    nodes = list(ast.walk(ast.parse(textwrap.dedent(text))))
    found = {node.attr for node in nodes if isinstance(node, ast.Attribute)}
    # A class body names what it defined before without `self`.
    return found | {node.id for node in nodes if isinstance(node, ast.Name)}
