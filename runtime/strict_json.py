"""JSON from files that nobody vouches for: bounded in size, one value a key, no number that a program cannot hold."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dayzero.runtime.errors import InputError

SHOWN = 80  # characters of a foreign value in a message


def shown(value: Any) -> str:
    """A foreign value as a message shows it: quoted, on one line, cut."""
    text = repr(value[:SHOWN]) if isinstance(value, str) else repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN - 3]}..."


def object_without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For json.loads(object_pairs_hook=...). Raises ValueError for a key that stands twice: which one counts?"""
    made = dict(pairs)
    if len(made) != len(pairs):
        seen: set[str] = set()
        twice = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise ValueError(f"the key {shown(twice)} stands twice")
    return made


def _finite(text: str) -> float:
    number = float(text)
    if number in (float("inf"), float("-inf")):
        raise ValueError(f"the number {shown(text)} is too large")
    return number


def _constant(text: str) -> float:
    """`Infinity` is a value that configs use for limits; NaN is none."""
    if text == "NaN":
        raise ValueError("NaN is no value")
    return float(text)


def _integer(text: str) -> int:
    if len(text) > 20 or not -(2**63) <= (number := int(text)) < 2**64:
        raise ValueError(f"the number {shown(text)} is beyond 64 bits")
    return number


def parse(
    text: bytes,
    hook: Callable[[list[tuple[str, Any]]], Any] = object_without_duplicates,
    parse_float: Callable[[str], float] = _finite,
    parse_int: Callable[[str], int] = _integer,
) -> Any:
    """The value. Raises ValueError, in one line, for what is not JSON or holds what no program should trust."""
    try:
        return json.loads(
            text.decode(),
            object_pairs_hook=hook,
            parse_float=parse_float,
            parse_constant=_constant,
            parse_int=parse_int,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def read_object(file: Path, longest: int) -> dict[str, Any]:
    """The JSON object of a file. Raises InputError for anything else, or for a file of more than `longest` bytes."""
    size = file.stat().st_size
    if size > longest:
        raise InputError(str(file), found=f"{size} bytes", expected=f"a JSON object of at most {longest} bytes")
    try:
        content = parse(file.read_bytes())
    except ValueError as error:
        raise InputError(str(file), found=f"not JSON ({error})", expected="a JSON object") from None
    if not isinstance(content, dict):
        raise InputError(str(file), found=f"a JSON {type(content).__name__}", expected="a JSON object")
    return content
