"""Folding of what depends on caches: a parameter that only a cache fills is None for ever.

`if cache is not None: ...` and `a if cache is None else b` leave the branch that training takes. Folding is exact: a
test is decided only where every name in it has one value that is known, None, True or False.
"""

from collections.abc import Collection
from typing import Any, Protocol

import libcst as cst
import libcst.matchers as m

# Parameters that carry what earlier calls of the same model left. The field's words, not a model's.
_CACHES = {
    "cache", "cache_params", "layer_past", "past_key_value", "past_key_values", "past_key_states",
    "past_value_states", "use_cache", "output_attentions", "output_hidden_states", "output_router_logits",
}  # fmt: skip
_FLAGS = {"use_cache", "output_attentions", "output_hidden_states", "output_router_logits"}

_UNKNOWN = object()


class Known(Protocol):
    """What names mean at the top of the file that the text comes from."""

    def value(self, name: str) -> Any: ...

    def constant(self, name: str) -> bool: ...

    def allowed(self, name: str) -> bool:
        """Whether an annotation may name it."""
        ...

    def droppable(self, name: str) -> bool:
        """Whether it is a decorator that computes nothing."""
        ...

    def is_module(self, name: str) -> bool:
        """Whether it is a class of modules, whose forward is all that is called from outside."""
        ...

    def is_logger(self, name: str) -> bool: ...

    def installed(self, name: str) -> bool | None:
        """What a function says that asks whether some package is installed; None for any other name."""
        ...


def cache_parameter(name: str) -> bool:
    """Whether a parameter of that name is there for caches or for what generation wants to see."""
    return name in _CACHES


def dotted(node: cst.BaseExpression) -> str:
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        return f"{dotted(node.value)}.{node.attr.value}"
    return ""


def fold_functions(module: cst.Module, known: Known) -> cst.Module:
    return module.visit(_FoldEach(known))


class _FoldEach(cst.CSTTransformer):
    """Folds every outermost function of the text; functions inside it are folded with it."""

    def __init__(self, known: Known):
        super().__init__()
        self.known, self.depth = known, 0

    def visit_FunctionDef(self, node):
        self.depth += 1

    def leave_FunctionDef(self, original_node, updated_node):
        self.depth -= 1
        return _fold(updated_node, original_node, self.known) if self.depth == 0 else updated_node


def _fold(function: cst.FunctionDef, original: cst.FunctionDef, known: Known) -> cst.FunctionDef:
    while True:
        constants = _constants_of(function, known)
        folded = function.visit(_Fold(constants, known, _bound_names(function)))
        assert isinstance(folded, cst.FunctionDef)
        if folded.deep_equals(function):
            return folded
        function = folded


def _parameters(function: cst.FunctionDef) -> list[cst.Param]:
    made = function.params
    return [*made.posonly_params, *made.params, *made.kwonly_params]


def _constants_of(function: cst.FunctionDef, known: Known) -> dict[str, Any]:
    """Local names that only ever hold one constant."""
    values: dict[str, list[Any]] = {}
    for parameter in _parameters(function):
        name = parameter.name.value
        # Only one that may be left out, by its default None or False.
        is_cache = cache_parameter(name) and isinstance(parameter.default, cst.Name)
        values[name] = [(False if name in _FLAGS else None) if is_cache else _UNKNOWN]
    for rest in (function.params.star_arg, function.params.star_kwarg):
        if isinstance(rest, cst.Param):
            values[rest.name.value] = [_UNKNOWN]
    found = Assigned()
    function.body.visit(found)
    for name, held in found.values.items():
        values.setdefault(name, []).extend(held)
    constants: dict[str, Any] = {}
    while True:
        more = {}
        for name, held in values.items():
            made = [
                value if value is _UNKNOWN or not isinstance(value, cst.BaseExpression)
                else _evaluate(value, constants, known, set(values))
                for value in held
            ]  # fmt: skip
            if name not in constants and made and made[0] is not _UNKNOWN and all(item is made[0] for item in made):
                more[name] = made[0]
        if not more:
            return constants
        constants |= more


class Assigned(cst.CSTVisitor):
    """Name -> the expressions that are assigned to it; _UNKNOWN for what no plain assignment shows."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, list[Any]] = {}

    def _add(self, name: str, value: Any) -> None:
        self.values.setdefault(name, []).append(value)

    def _target(self, target: cst.BaseExpression, value: Any) -> None:
        if isinstance(target, cst.Name):
            self._add(target.value, value)
        elif isinstance(target, (cst.Tuple, cst.List)):
            parts = [element.value for element in target.elements]
            given: list[Any] = [_UNKNOWN] * len(parts)
            if isinstance(value, cst.Tuple) and len(value.elements) == len(parts):
                given = [element.value for element in value.elements]
            if any(isinstance(element, cst.StarredElement) for element in target.elements):
                given = [_UNKNOWN] * len(parts)
            for part, one in zip(parts, given, strict=True):
                self._target(part, one)
        elif isinstance(target, cst.StarredElement):
            self._target(target.value, _UNKNOWN)

    def visit_Assign(self, node: cst.Assign) -> None:
        for target in node.targets:
            self._target(target.target, node.value)

    def visit_AnnAssign(self, node: cst.AnnAssign) -> None:
        if node.value is not None:
            self._target(node.target, node.value)

    def visit_AugAssign(self, node: cst.AugAssign) -> None:
        self._target(node.target, _UNKNOWN)

    def visit_NamedExpr(self, node: cst.NamedExpr) -> None:
        self._target(node.target, _UNKNOWN)

    def visit_For(self, node: cst.For) -> None:
        self._target(node.target, _UNKNOWN)

    def visit_CompFor(self, node: cst.CompFor) -> None:
        self._target(node.target, _UNKNOWN)

    def visit_AsName(self, node: cst.AsName) -> None:
        self._target(node.name, _UNKNOWN)

    def visit_Del(self, node: cst.Del) -> None:
        self._target(node.target, _UNKNOWN)

    def visit_Param(self, node: cst.Param) -> None:
        self._add(node.name.value, _UNKNOWN)

    def visit_FunctionDef(self, node: cst.FunctionDef) -> None:
        self._add(node.name.value, _UNKNOWN)

    def visit_Global(self, node: cst.Global) -> None:
        for item in node.names:
            self._add(item.name.value, _UNKNOWN)

    def visit_Nonlocal(self, node: cst.Nonlocal) -> None:
        for item in node.names:
            self._add(item.name.value, _UNKNOWN)

    def visit_ImportAlias(self, node: cst.ImportAlias) -> None:
        self._add(node.evaluated_alias or node.evaluated_name.split(".")[0], _UNKNOWN)


def _bound_names(function: cst.FunctionDef) -> set[str]:
    found = Assigned()
    function.body.visit(found)
    return set(found.values) | {parameter.name.value for parameter in _parameters(function)}


_LITERALS = {"None": None, "True": True, "False": False}


def _evaluate(node: cst.BaseExpression, constants: dict[str, Any], known: Known, local: Collection[str]) -> Any:
    """The value of an expression if it is certain, else _UNKNOWN."""
    if isinstance(node, cst.Name):
        if node.value in _LITERALS:
            return _LITERALS[node.value]
        if node.value in constants:
            return constants[node.value]
        if node.value not in local and known.constant(node.value):
            return known.value(node.value)
    elif isinstance(node, cst.Call) and isinstance(node.func, cst.Name) and not node.args:
        found = known.installed(node.func.value)
        return _UNKNOWN if found is None else found
    elif isinstance(node, cst.UnaryOperation) and isinstance(node.operator, cst.Not):
        value = _evaluate(node.expression, constants, known, local)
        return value if value is _UNKNOWN else not value
    elif isinstance(node, cst.Comparison) and len(node.comparisons) == 1:
        operator, right = node.comparisons[0].operator, node.comparisons[0].comparator
        left_value = _evaluate(node.left, constants, known, local)
        right_value = _evaluate(right, constants, known, local)
        if left_value is not _UNKNOWN and right_value is not _UNKNOWN:
            if isinstance(operator, cst.Is):
                return left_value is right_value
            if isinstance(operator, cst.IsNot):
                return left_value is not right_value
    elif isinstance(node, cst.BooleanOperation):
        left_value = _evaluate(node.left, constants, known, local)
        right_value = _evaluate(node.right, constants, known, local)
        if left_value is not _UNKNOWN:
            stops = not left_value if isinstance(node.operator, cst.And) else bool(left_value)
            return left_value if stops else right_value
        # The left side may be anything but has no effect: what decides is whether the right one is enough.
        if right_value is not _UNKNOWN and isinstance(node.operator, cst.And) and not right_value:
            return False if _is_pure(node.left) else _UNKNOWN
    return _UNKNOWN


def _is_pure(node: cst.BaseExpression) -> bool:
    """Whether leaving the expression out changes nothing: no call, no assignment."""
    return not m.findall(node, m.Call() | m.NamedExpr() | m.Await() | m.Yield())


class _Fold(cst.CSTTransformer):
    def __init__(self, constants: dict[str, Any], known: Known, local: Collection[str]):
        super().__init__()
        self.constants, self.known, self.local = constants, known, local
        self.inner: list[cst.CSTNode] = []

    def _test(self, node: cst.BaseExpression) -> Any:
        return _evaluate(node, self.constants, self.known, self.local)

    def visit_If(self, node: cst.If) -> None:
        if isinstance(node.orelse, cst.If):
            self.inner.append(node.orelse)

    def leave_If(self, original_node, updated_node):
        orelse = updated_node.orelse
        if isinstance(orelse, cst.If):
            value = self._test(orelse.test)
            if value is not _UNKNOWN:
                orelse = cst.Else(orelse.body, leading_lines=orelse.leading_lines) if value else orelse.orelse
                updated_node = updated_node.with_changes(orelse=orelse)
        if any(original_node is node for node in self.inner):
            return updated_node
        value = self._test(updated_node.test)
        if value is _UNKNOWN:
            return updated_node
        if value:
            return _statements(updated_node.body)
        if orelse is None:
            return cst.SimpleStatementLine([cst.Pass()])
        return orelse.with_changes() if isinstance(orelse, cst.If) else _statements(orelse.body)

    def leave_Comparison(self, original_node, updated_node):
        value = self._test(updated_node)
        return updated_node if value is _UNKNOWN else cst.Name(str(value))

    def leave_IfExp(self, original_node, updated_node):
        value = self._test(updated_node.test)
        return updated_node if value is _UNKNOWN else updated_node.body if value else updated_node.orelse

    def leave_BooleanOperation(self, original_node, updated_node):
        value = self._test(updated_node.left)
        if value is _UNKNOWN:
            return updated_node
        stops = not value if isinstance(updated_node.operator, cst.And) else bool(value)
        return updated_node.left if stops else updated_node.right

    def leave_IndentedBlock(self, original_node, updated_node):
        kept = [line for line in updated_node.body if not _is_pass(line)]
        after = next((number for number, line in enumerate(kept) if _leaves(line)), None)
        if after is not None:
            kept = kept[: after + 1]
        return updated_node.with_changes(body=kept or [cst.SimpleStatementLine([cst.Pass()])])


def _is_pass(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and all(isinstance(part, cst.Pass) for part in line.body)


def _leaves(line: cst.CSTNode) -> bool:
    return isinstance(line, cst.SimpleStatementLine) and any(isinstance(p, (cst.Return, cst.Raise)) for p in line.body)


def _statements(body: cst.BaseSuite) -> Any:
    if isinstance(body, cst.IndentedBlock):
        return cst.FlattenSentinel(body.body)
    return cst.SimpleStatementLine(list(body.body))  # type: ignore[attr-defined]
