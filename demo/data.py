"""The demo's data: questions about Python's standard library, answered by its own docstrings.

python demo/data.py FOLDER [--rows 2000] [--seed 0]
"""

import argparse
import importlib
import inspect
import json
import os
import pkgutil
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

SHORTEST, LONGEST = 40, 300  # characters of an answer
HELD_OUT = 20  # one row in so many
QUESTIONS = {
    "callable": [
        "What does `{}` do in Python?",
        "How does Python's `{}` work?",
        "Explain `{}` from the Python standard library.",
        "When would I call `{}` in Python?",
    ],
    "class": [
        "What is `{}` in Python?",
        "What is Python's class `{}` for?",
        "Explain `{}` from the Python standard library.",
        "When would I use `{}` in Python?",
    ],
}
# Modules that open windows or a browser, print, write files or belong to one platform; and aliases, whose members are
# known by another name (posixpath.join is os.path.join).
SKIPPED = {"antigravity", "this", "test", "idlelib", "tkinter", "turtle", "turtledemo", "lib2to3", "ensurepip"}
SKIPPED |= {"pydoc_data", "encodings", "distutils", "msilib", "nt", "posix", "posixpath", "ntpath", "genericpath"}
SKIPPED |= {"pyexpat", "sre_compile", "sre_constants", "sre_parse"}


def write(folder: Path, rows: int = 2000, seed: int = 0) -> tuple[Path, Path]:
    """Writes train.jsonl and heldout.jsonl, together `rows` chats of one question and one answer; returns both paths.

    One row in twenty is held out; no answer occurs twice. The same Python version and seed give the same files. Raises
    ValueError if this Python has fewer docstrings than `rows`.
    """
    known = docstrings()
    if rows > len(known):
        raise ValueError(f"rows={rows}, but this Python has {len(known)} suitable docstrings")
    generator = random.Random(seed)
    chats = [
        {
            "messages": [
                {"role": "user", "content": generator.choice(QUESTIONS[kind]).format(name)},
                {"role": "assistant", "content": answer},
            ]
        }
        for name, kind, answer in generator.sample(known, rows)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    held_out = rows // HELD_OUT
    for name, part in (("heldout.jsonl", chats[:held_out]), ("train.jsonl", chats[held_out:])):
        partial = folder / f".{name}"
        partial.write_text("".join(json.dumps(chat, ensure_ascii=False) + "\n" for chat in part), encoding="utf-8")
        partial.replace(folder / name)
    return folder / "train.jsonl", folder / "heldout.jsonl"


def docstrings() -> list[tuple[str, str, str]]:
    """(name, kind, docstring), sorted by name; collected in another process, as modules print and patch at import."""
    child = subprocess.run(
        [sys.executable, "-P", "-W", "ignore", __file__, "--collect"],
        env={**os.environ, "PYTHONHASHSEED": "0"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        check=True,
    )
    return [tuple(entry) for entry in json.loads(child.stdout)]


def collect() -> list[tuple[str, str, str]]:
    """What `docstrings` returns, from this process: imports most of the standard library."""
    found = []
    for module, contents in modules():
        for name, member in public(contents):
            where = f"{module}.{name}" if module != "builtins" else name
            home = getattr(member, "__module__", None) or module  # C functions may have none
            if home.split(".")[0] not in sys.stdlib_module_names:
                continue
            borrowed = home != module
            found.append((borrowed, where, member))
            if inspect.isclass(member):
                found += [(borrowed, f"{where}.{method}", value) for method, value in public(member)]
    entries: dict[str, tuple[str, str, str]] = {}
    for _, name, member in sorted(found, key=lambda entry: entry[:2]):  # a name at home wins over the same one imported
        if answer := clean(member, name):
            entries.setdefault(answer, (name, "class" if inspect.isclass(member) else "callable", answer))
    return sorted(entries.values())


def modules() -> Iterator[tuple[str, ModuleType]]:
    """The public modules of the standard library that import here, each with the name to call it by."""
    for name in sorted(sys.stdlib_module_names - SKIPPED | {"os.path"}):
        if name.startswith("_") or not (module := attempt(name)):
            continue
        yield name, module
        for part in pkgutil.walk_packages(getattr(module, "__path__", ()), f"{name}.", onerror=lambda _: None):
            if not re.search(r"\.(_|tests?\b)", part.name) and (submodule := attempt(part.name)):
                yield part.name, submodule


def attempt(name: str) -> ModuleType | None:
    """The module, or None where it does not import: some need another platform or an optional library."""
    try:
        return importlib.import_module(name)
    except Exception:
        return None


def public(owner) -> list[tuple[str, object]]:
    """Functions and classes among the owner's own attributes, sorted by name, without underscored ones."""
    members = ((name, getattr(owner, name, None)) for name in sorted(vars(owner)) if not name.startswith("_"))
    return [(name, member) for name, member in members if inspect.isroutine(member) or inspect.isclass(member)]


def clean(member, name: str) -> str | None:
    """The member's own docstring with its whitespace tidied, or None if it does not make an answer."""
    text = member.__doc__ if isinstance(member.__doc__, str) else ""
    text = re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in inspect.cleandoc(text).splitlines())).strip()
    generated = re.fullmatch(rf"{re.escape(name.split('.')[-1])}\(.*\)", text) or re.search(r" at 0x[0-9a-f]+", text)
    return text if SHORTEST <= len(text) <= LONGEST and not generated else None


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the demo's chats to train.jsonl and heldout.jsonl.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument("--rows", type=int, default=2000, help="chats in both files together (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of docstrings and questions (%(default)s)")
    try:
        train, held_out = write(**vars(parser.parse_args()))
    except ValueError as error:
        parser.exit(2, f"error: {error}\n")
    print(f"wrote {train} and {held_out}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--collect"]:
        output = os.fdopen(os.dup(1), "w", encoding="utf-8")
        os.dup2(2, 1)  # whatever a module prints goes to standard error
        json.dump(collect(), output)
        output.close()
    else:
        main()
