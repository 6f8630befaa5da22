"""Files of a package that are code: each is a module of its own, which no other package's is taken for."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

from dayzero.runtime.errors import InputError


def load_module(file: Path) -> ModuleType:
    """Executes the file. Raises InputError where there is none."""
    name = f"dayzero_generated_{'_'.join(file.with_suffix('').parts[-3:])}"
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None or not file.is_file():
        raise InputError(str(file), found="no such file", expected="a complete package", hint="Run onboard again.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
