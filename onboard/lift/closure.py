"""Copies a module class of the reference into source text of its own, by the closure of the names it uses.

Each definition is taken from its file, cleaned (`cleaning`), and compiled; the global names that its code
loads are resolved in the module it came from, and lifted in turn. What is left of the library that it was written for
is imported from `dayzero.runtime.nn.upstream`, which has small equivalents; torch and a few modules of the standard
library are imported as they are, and nothing else is.
"""

import ast
import builtins
import dis
import functools
import hashlib
import inspect
import logging
import sys
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn

from dayzero.onboard.lift.cleaning import clean
from dayzero.onboard.lift.folding import Known
from dayzero.onboard.lift.source import LiftError, Source, defined, module_of, source_of
from dayzero.onboard.oracle.training_modes import with_gradients
from dayzero.runtime.nn import upstream
from dayzero.runtime.nn.lifted_source import IMPORTS, UPSTREAM


@dataclass(frozen=True)
class Definition:
    """A top-level statement of lifted source. file: where it came from, as shown; lines: first and last there."""

    name: str
    file: str
    lines: tuple[int, int]
    text: str


@dataclass(frozen=True)
class Lift:
    """name: of the class in the text. definitions: in an order in which they can be executed. imports: statements.
    licences: file -> the comment at its head. after: index from which definitions are of the next file."""

    name: str
    definitions: tuple[Definition, ...]
    imports: frozenset[str]
    licences: tuple[tuple[str, str], ...]

    def __bool__(self) -> bool:
        return True


def lift(cls: type[nn.Module], replaced: Iterable[str] = ()) -> Lift:
    """The class and all that it needs.

    replaced: attributes of the class whose modules will be put in by the caller; what makes them is left out, and the
    class is named after them. Raises LiftError.
    """
    return _lift(cls, frozenset(replaced))


@functools.lru_cache(maxsize=512)
def _lift(cls: type[nn.Module], replaced: frozenset[str]) -> Lift:
    closure = _Closure()
    if cls.__qualname__ != cls.__name__:
        raise LiftError(f"{cls.__qualname__} is defined inside something else")
    closure.want(source_of(module_of(cls)), cls.__name__, replaced)
    closure.run()
    files = closure.order()
    definitions = tuple(
        definition
        for file in files
        for definition in sorted(closure.definitions[file].values(), key=lambda made: made.lines)
    )
    licences = tuple((file.label, file.licence) for file in files)
    return Lift(lifted_name(cls.__name__, replaced), definitions, frozenset(closure.imports), licences)


def lifted_name(name: str, replaced: Iterable[str]) -> str:
    """The name of the class in lifted source: its own, or with what it stands around."""
    around = "_".join(sorted(path.replace(".", "_") for path in replaced))
    return f"{name}_around_{around}" if around else name


def merge(lifts: Iterable[Lift]) -> str:
    """One source text with every definition once, "" for none. Raises LiftError where two differ under one name."""
    held: dict[str, dict[str, Definition]] = {}
    imports: set[str] = set()
    licences: dict[str, str] = {}
    for made in lifts:
        imports |= made.imports
        licences |= dict(made.licences)
        for definition in made.definitions:
            held.setdefault(definition.file, {})[definition.name] = definition
    names: dict[str, Definition] = {}
    for definition in (item for file in held.values() for item in file.values()):
        if names.setdefault(definition.name, definition).text != definition.text:
            other = names[definition.name].file
            raise LiftError(f"{definition.name} is one thing in {other} and another in {definition.file}")
    if not names:
        return ""
    return _text(held, sorted(imports), licences)


def _text(held: dict[str, dict[str, Definition]], imports: list[str], licences: dict[str, str]) -> str:
    parts = [
        '"""Layers that no proven block stands for, copied from the reference: eager, correct, slow.\n\n'
        "Caches and generation are left out. The code is the work of its authors, under the licences below.\n"
        '"""'
    ]
    shown: dict[str, list[str]] = {}
    for file in held:
        if licences.get(file):
            shown.setdefault(licences[file], []).append(file)
    parts += ["\n".join([*(f"# From {file}:" for file in files), licence]) for licence, files in shown.items()]
    parts.append("\n".join(imports))
    seen: set[str] = set()
    for file in _by_dependence(held):
        for definition in sorted(held[file].values(), key=lambda made: made.lines):
            if definition.name not in seen:
                seen.add(definition.name)
                first, last = definition.lines
                parts.append(f"# lifted from {definition.file}:{first}-{last}\n{definition.text.strip()}")
    return "\n\n\n".join(parts) + "\n"


def _by_dependence(held: dict[str, dict[str, Definition]]) -> list[str]:
    """Files such that what a file's statements load when they are executed stands before them."""
    owner = {name: file for file, items in held.items() for name in items}
    after = {
        file: {
            owner[name]
            for item in items.values()
            for name in _loaded_at_once(item.text)
            if name in owner and owner[name] != file
        }
        for file, items in held.items()
    }
    done: list[str] = []

    def visit(file: str, path: tuple[str, ...]) -> None:
        if file in done or file in path:
            return
        for other in sorted(after[file]):
            visit(other, (*path, file))
        done.append(file)

    for file in sorted(held):
        visit(file, ())
    return done


class _Closure:
    """Definitions wanted and made, file by file."""

    def __init__(self) -> None:
        self.definitions: dict[Source, dict[str, Definition]] = {}
        self.imports: set[str] = set()
        self._todo: list[tuple[Source, str, frozenset[str]]] = []

    def want(self, source: Source, name: str, replaced: frozenset[str] = frozenset()) -> None:
        made = self.definitions.setdefault(source, {})
        if name not in made and (source, name, replaced) not in self._todo:
            self._todo.append((source, name, replaced))

    def run(self) -> None:
        while self._todo:
            source, name, replaced = self._todo.pop(0)
            self._define(source, name, replaced)

    def order(self) -> list[Source]:
        """Files, those first that others need when they are imported."""
        labels = {source.label: source for source in self.definitions}
        held = {label: dict(self.definitions[source]) for label, source in labels.items()}
        return [labels[label] for label in _by_dependence(held)]

    def _define(self, source: Source, name: str, replaced: frozenset[str]) -> None:
        statement = source.statements.get(name)
        if statement is None:
            raise LiftError(f"{name} is not defined at the top of {source.label}")
        text, lines = source.segment(statement)
        shown = lifted_name(name, replaced)
        held = vars(source.module).get(name)
        trained = with_gradients(held) if isinstance(held, type) else []
        cleaned = clean(text, _Names(source), source.attributes, replaced, shown, trained)
        self.definitions[source][name] = Definition(shown, source.label, lines, cleaned)
        for used in sorted(_free_names(cleaned, source.label)):
            if used != shown:
                self._resolve(source, used)

    def _resolve(self, source: Source, name: str) -> None:
        """Makes `name` mean in the lifted text what it means in the file."""
        held = vars(source.module)
        if name not in held:
            raise LiftError(f"{source.label} uses {name}, which it does not define")
        value = held[name]
        if (ours := substitute(value, name)) is not None:
            self.imports.add(f"from {UPSTREAM} import {ours}" + (f" as {name}" if ours != name else ""))
        elif (statement := _import(source, name, value)) is not None:
            self.imports.add(statement)
        elif name in source.statements and isinstance(source.statements[name], (ast.ClassDef, ast.FunctionDef)):
            self.want(source, name)
        elif _is_plain(value):
            self._constant(source, name, value)
        elif isinstance(value, type) or callable(value):
            self._elsewhere(source, name, value)
        elif name in source.statements:
            self.want(source, name)
        else:
            self._follow_import(source, name)

    def _constant(self, source: Source, name: str, value: Any) -> None:
        statement = source.statements.get(name)
        lines = source.segment(statement)[1] if statement is not None else (1, 1)
        made = self.definitions.setdefault(source, {})
        made.setdefault(name, Definition(name, source.label, lines, f"{name} = {value!r}\n"))

    def _elsewhere(self, source: Source, name: str, value: Any) -> None:
        """A class or function that another file defines, or this one under another name."""
        plain = inspect.unwrap(value) if callable(value) and not isinstance(value, type) else value
        other = source_of(module_of(plain))
        if not may_follow(other.module, source.module):
            raise LiftError(f"{source.label} uses {name} of {other.module.__name__}, which is not lifted")
        original = plain.__name__
        if original not in other.statements:
            if name in source.statements:
                self.want(source, name)
                return
            raise LiftError(f"{name} is not defined at the top of {other.label}")
        self.want(other, original)
        if original != name:
            made = self.definitions.setdefault(source, {})
            made.setdefault(name, Definition(name, source.label, (1, 1), f"{name} = {original}\n"))

    def _follow_import(self, source: Source, name: str) -> None:
        module, original = source.bound.get(name, ("", None))
        other = sys.modules.get(module)
        if other is None or original is None or not may_follow(other, source.module):
            raise LiftError(f"{source.label} uses {name}, which is neither plain data nor a definition")
        self.want(source_of(other), original)
        if original != name:
            made = self.definitions.setdefault(source, {})
            made.setdefault(name, Definition(name, source.label, (1, 1), f"{name} = {original}\n"))


class _Names(Known):
    """What names mean in a file, for `clean`."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def value(self, name: str) -> Any:
        return vars(self.source.module).get(name, getattr(builtins, name, None))

    def constant(self, name: str) -> bool:
        """Whether the name is bound to None, True or False at the top of the file."""
        held = vars(self.source.module)
        return name in held and (held[name] is None or isinstance(held[name], bool))

    def allowed(self, name: str) -> bool:
        if hasattr(builtins, name):
            return True
        value = self.value(name)
        return _import(self.source, name, value) is not None

    def droppable(self, name: str) -> bool:
        return upstream_decorator(self.value(name))

    def installed(self, name: str) -> bool | None:
        value = self.value(name)
        home = getattr(value, "__module__", None)
        if home != "transformers.utils.import_utils" or not name.startswith("is_") or not name.endswith("_available"):
            return None
        # Lifted code runs where torch is, and perhaps nothing else.
        return name == "is_torch_available"

    def is_module(self, name: str) -> bool:
        value = self.value(name)
        return isinstance(value, type) and issubclass(value, nn.Module)

    def is_logger(self, name: str) -> bool:
        return isinstance(self.value(name), logging.Logger)


# Decorators of the library that document, rename, cache, capture or dispatch, and compute nothing.
_DECORATORS = {
    "accepts_precomputed_kwargs", "add_start_docstrings", "add_start_docstrings_to_model_forward", "auto_docstring",
    "can_return_tuple", "capture_outputs", "check_model_inputs", "compile_compatible_method_lru_cache",
    "deprecate_kwarg", "force_accelerate_hooks", "merge_with_config_defaults", "replace_return_docstrings",
    "use_experts_implementation", "use_kernel_forward_from_hub", "use_kernel_func_from_hub",
    "use_kernel_func_from_hub_with_fallback", "use_kernelized_func",
}  # fmt: skip


def upstream_decorator(value: Any) -> bool:
    """Whether it is a decorator of the library that may be left out."""
    module = getattr(value, "__module__", None) or ""
    return module.split(".")[0] in {"transformers", "kernels"} and getattr(value, "__name__", "") in _DECORATORS


def substitute(value: Any, name: str) -> str | None:
    """The name in `runtime.nn.upstream` of what stands for this object of the library, None if nothing does."""
    if isinstance(value, types.ModuleType):
        home, _, known = value.__name__.rpartition(".")
    else:
        home = getattr(value, "__module__", None) or type(value).__module__
        known = getattr(value, "__name__", None) or name
    if home.split(".")[0] != "transformers" or home.startswith("transformers.models."):
        return None
    return known if known in upstream.__all__ else None


def may_follow(module: types.ModuleType, from_module: types.ModuleType) -> bool:
    """Whether source of that module may be lifted: the library's own, or of the package that the class is in."""
    root = module.__name__.split(".")[0]
    return root == "transformers" or root == from_module.__name__.split(".")[0]


def _import(source: Source, name: str, value: Any) -> str | None:
    """The import that binds the name to what torch or the standard library have, None if they do not."""
    if isinstance(value, types.ModuleType):
        if value.__name__.split(".")[0] not in IMPORTS:
            return None
        parent, _, last = value.__name__.rpartition(".")
        if name == last and parent:
            return f"from {parent} import {last}"
        return f"import {value.__name__}" + (f" as {name}" if name != value.__name__ else "")
    module, original = source.bound.get(name, ("", None))
    if original is not None and module.split(".")[0] in IMPORTS:
        return f"from {module} import {original}" + (f" as {name}" if original != name else "")
    return None


def _is_plain(value: Any) -> bool:
    if isinstance(value, (tuple, list)):
        return all(map(_is_plain, value))
    if isinstance(value, dict):
        return all(_is_plain(key) and _is_plain(held) for key, held in value.items())
    return value is None or type(value) in {bool, int, float, str}


def _free_names(text: str, label: str) -> set[str]:
    """Global names that the text's code loads, at once or when it is called, builtins and its own left out."""
    found: set[str] = set()
    todo = [compile(text, label, "exec", dont_inherit=True)]
    own = {name for statement in ast.parse(text).body for name in defined(statement)}
    while todo:
        code = todo.pop()
        todo += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
        found |= _loads(code)
    return {name for name in found - own if not hasattr(builtins, name)}


def _loads(code: types.CodeType) -> set[str]:
    stored = {i.argval for i in dis.get_instructions(code) if i.opname == "STORE_NAME"}
    return {
        instruction.argval
        for instruction in dis.get_instructions(code)
        if instruction.opname == "LOAD_GLOBAL"
        or (instruction.opname in {"LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"} and instruction.argval not in stored)
    } - {"__name__", "__module__", "__qualname__"}


def _loaded_at_once(text: str) -> set[str]:
    """Names that the statement loads when it is executed: bases, decorators, defaults, class bodies."""
    found: set[str] = set()
    todo = [compile(text, "lifted", "exec", dont_inherit=True)]
    while todo:
        code = todo.pop()
        found |= _loads(code)
        # Class bodies run at once; functions do not. Only the former are free of CO_OPTIMIZED.
        todo += [
            constant
            for constant in code.co_consts
            if isinstance(constant, types.CodeType) and not constant.co_flags & inspect.CO_OPTIMIZED
        ]
    return found


def digest(text: str) -> str:
    """Short name of a source text."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]
