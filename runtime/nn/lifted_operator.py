"""Operators of a package for its lifted classes: the class itself, or with a hand-written forward in its place."""

import types
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from dayzero.runtime.errors import InputError
from dayzero.runtime.generated_code import load_module

from .lifted_source import classes_of


def operator(file: str, name: str) -> type:
    """The lifted class of that name, for `operators/X.py` of a package, which is `file`. Where there is `custom/X.py`
    its function

        def forward(module, ...)

    runs instead of the class's own forward, with the module in place of self: same arguments, same results. Parameters
    and constructor stay those of the class. What it raises beside RuntimeError becomes one that names the file.

    Raises InputError for a custom file that cannot be imported or has no such function.
    """
    here = Path(file)
    lifted = classes_of((here.parents[1] / "lifted.py").read_text(encoding="utf-8"))[name]
    custom = here.parents[1] / "custom" / here.name
    if not custom.is_file():
        return lifted
    shown = f"custom/{here.name}"
    try:
        run = load_module(custom).forward
    except Exception as error:  # whatever hand-written code raises
        expected = f"def forward(module, ...), the arguments as in {name}.forward of lifted.py"
        raise InputError(str(custom), found=f"{type(error).__name__}: {error}", expected=expected) from error

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return run(self, *args, **kwargs)
        except RuntimeError:
            raise
        except Exception as error:
            raise RuntimeError(f"{shown}: {type(error).__name__}: {error}") from error

    return type(name, (lifted,), {"forward": forward, "custom": shown})


def beside(file: str, names: Iterable[str]) -> types.SimpleNamespace:
    """Name -> class of the operators `names`, for the model.py of a package, which is `file`."""
    found: dict[str, type] = {}
    for name in names:
        held = vars(load_module(Path(file).with_name("operators") / f"{name}.py"))
        found |= {key: value for key, value in held.items() if isinstance(value, type)}
    return types.SimpleNamespace(**found)


def custom_of(module: Any) -> list[str]:
    """The custom files that the module and those inside it run, each once."""
    return list(dict.fromkeys(file for held in module.modules() if (file := getattr(type(held), "custom", None))))
