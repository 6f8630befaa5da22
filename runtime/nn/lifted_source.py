"""The source text of lifted classes: what it may import, and the classes that it makes."""

import ast
import functools
import hashlib
import inspect
import linecache
import types
from collections.abc import Mapping

# What lifted source may import, by the first part of the name; of our own, `runtime.nn.upstream` alone.
IMPORTS = {
    "abc", "bisect", "collections", "contextlib", "copy", "dataclasses", "enum", "functools", "inspect", "itertools",
    "logging", "math", "numbers", "operator", "random", "string", "torch", "types", "typing", "warnings",
}  # fmt: skip
UPSTREAM = "dayzero.runtime.nn.upstream"
_REFUSED = {"__import__", "breakpoint", "compile", "eval", "exec", "globals", "open"}


def check_source(source: str) -> None:
    """Raises ValueError for lifted source that imports, or calls by name, what no arithmetic needs.

    This catches mistakes and makes review short. It confines nothing: lifted source is code, as trusted as where it
    came from.
    """
    for node in ast.walk(ast.parse(source)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        for name in names:
            if name != UPSTREAM and name.split(".")[0] not in IMPORTS:
                raise ValueError(f"line {node.lineno} imports {name}")  # type: ignore[attr-defined]
        if isinstance(node, ast.Name) and node.id in _REFUSED:
            raise ValueError(f"line {node.lineno} uses {node.id}")
        # `input` is a usual name of a value.
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "input":
            raise ValueError(f"line {node.lineno} calls input")


@functools.lru_cache(maxsize=64)
def classes_of(source: str) -> Mapping[str, type]:
    """Name -> class of lifted source text, which is executed. {} for no text. Raises ValueError (`check_source`)."""
    if not source:
        return {}
    check_source(source)
    name = f"dayzero_lifted_{hashlib.sha256(source.encode()).hexdigest()[:12]}"
    module = types.ModuleType(name)
    file = f"<{name}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec", dont_inherit=True), vars(module))
    return {
        held.__name__: held
        for held in vars(module).values()
        if inspect.isclass(held) and held.__module__ == name
    }  # fmt: skip
