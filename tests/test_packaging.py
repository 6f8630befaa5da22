"""What the wheel holds, and who imports whom (docs/architecture.md)."""

import ast
import configparser
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
PACKAGED = ("kernels", "onboard", "runtime", "templates")
EXTRAS = ("datasets", "langchain", "langgraph", "torch_npu", "transformers", "triton")
MACHINE_PATH = re.compile(rf"(?<![\w.*}}])/({'|'.join(['root', 'work'])})/")


def tracked(*folders: str) -> list[PurePosixPath]:
    """Files under version control that exist, relative to the root; all of them without `folders`."""
    listed = subprocess.run(["git", "ls-files", "-z", "--", *folders], cwd=ROOT, capture_output=True, check=True)
    paths = (PurePosixPath(name) for name in listed.stdout.decode().split("\0") if name)
    return [path for path in paths if (ROOT / path).is_file()]


class Import(NamedTuple):
    module: str  # absolute: a relative import is resolved
    lazy: bool  # inside a function
    where: str


def imports(path: PurePosixPath) -> Iterator[Import]:
    package = list(path.parent.parts)
    if package[0] in PACKAGED:
        package.insert(0, "dayzero")

    def visit(node: ast.AST, lazy: bool) -> Iterator[Import]:
        where = f"{path}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, lazy, where) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            parts = [*base, *([node.module] if node.module else [])]
            yield from (Import(".".join([*parts, alias.name]), lazy, where) for alias in node.names)
        inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for child in ast.iter_child_nodes(node):
            yield from visit(child, inside)

    return visit(ast.parse((ROOT / path).read_text(encoding="utf-8")), False)


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)


def sources(*folders: str) -> list[PurePosixPath]:
    return [path for path in tracked(*folders) if path.suffix == ".py"]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> zipfile.ZipFile:
    """The wheel, built from a copy of the tracked files: nothing is left in the work tree."""
    copy, dist = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    for path in tracked():
        (copy / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / path, copy / path)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(dist), str(copy)]
    built = subprocess.run(command, capture_output=True, text=True)
    assert built.returncode == 0, built.stdout + built.stderr
    return zipfile.ZipFile(next(dist.glob("*.whl")))


def test_wheel_holds_the_packaged_folders_and_nothing_else(wheel):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = {name for name in wheel.namelist() if not name.endswith("/")}
    metadata = f"{project['name']}-{project['version']}.dist-info"
    assert {name.split("/")[0] for name in names} == {"dayzero", metadata}
    code = {name for name in names if name.startswith("dayzero/")}
    wanted = {f"dayzero/{path}" for path in tracked(*PACKAGED)}
    assert not code - wanted, f"not tracked, yet in the wheel: {sorted(code - wanted)}"
    missing = {name for name in wanted - names if PurePosixPath(name).suffix in (".py", ".j2")}
    folders = sorted({str(PurePosixPath(name).parent).replace("/", ".") for name in missing})
    assert not missing, f"[tool.setuptools] in pyproject.toml leaves out {folders}: {sorted(missing)}"


def test_commands_are_onboard_and_runtime(wheel):
    points = configparser.ConfigParser()
    points.read_string(wheel.read(next(n for n in wheel.namelist() if n.endswith("entry_points.txt"))).decode())
    assert {section: dict(points[section]) for section in points.sections()} == {
        "console_scripts": {"onboard": "dayzero.onboard.cli:main", "runtime": "dayzero.runtime.cli:main"}
    }


def test_kernels_import_torch_and_load_device_libraries_late():
    own = (*sys.stdlib_module_names, "torch", "dayzero.kernels")
    device = ("triton", "torch_npu")
    wrong = [
        found
        for path in sources("kernels")
        for found in imports(path)
        if not within(found.module, *own)
        and not (within(found.module, *device) and (found.lazy or path.stem in ("kernel", "npu")))
    ]
    assert not wrong


def test_runtime_imports_neither_onboard_nor_templates():
    found = [each for path in sources("runtime") for each in imports(path)]
    assert any(within(each.module, "dayzero.kernels") for each in found)  # relative or not, imports are seen
    assert not [each for each in found if within(each.module, "dayzero.onboard", "dayzero.templates")]


def test_onboard_reads_no_generated_package():
    assert not [each for path in sources("onboard") for each in imports(path) if within(each.module, "generated")]


def test_generated_packages_import_torch_and_the_runtime():
    wrong = []
    for path in sources("generated"):
        package, *inner = path.parts[1:]
        allowed = [*sys.stdlib_module_names, "torch", "dayzero.runtime", f"generated.{package}"]
        if inner[0] == "operators":
            allowed.append("dayzero.kernels")
        if inner[0] != "tests":
            wrong += [each for each in imports(path) if not within(each.module, *allowed)]
    assert not wrong


@pytest.mark.slow
@pytest.mark.parametrize("installed", [True, False])
def test_runtime_loads_no_extra_and_needs_none(installed):
    """All modules of the runtime are imported, with the extra libraries at hand and as on a bare training node."""
    modules = [
        ".".join(("dayzero", *path.with_suffix("").parts)).removesuffix(".__init__") for path in sources("runtime")
    ]
    hide = "" if installed else f"sys.modules.update(dict.fromkeys({EXTRAS!r})); "
    code = (
        f"import sys; {hide}import {', '.join(modules)}; print([name for name in {EXTRAS!r} if sys.modules.get(name)])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert loaded.returncode == 0, loaded.stderr
    assert loaded.stdout.strip() == "[]"


def test_no_file_knows_the_machine_it_was_written_on():
    found = {}
    for path in tracked():
        text = (ROOT / path).read_text(encoding="utf-8", errors="ignore")
        if match := MACHINE_PATH.search(text):
            found[str(path)] = text[match.start() :].split("\n")[0][:80]
    assert not found


def test_the_import_reader_resolves_what_it_reads(tmp_path, monkeypatch):
    (tmp_path / "kernels" / "swiglu").mkdir(parents=True)
    (tmp_path / "kernels" / "swiglu" / "x.py").write_text(
        "import torch.nn as nn\nfrom . import kernel\nfrom ..registry import operator\ndef f():\n    import triton\n"
    )
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    assert [(each.module, each.lazy) for each in imports(PurePosixPath("kernels/swiglu/x.py"))] == [
        ("torch.nn", False),
        ("dayzero.kernels.swiglu.kernel", False),
        ("dayzero.kernels.registry.operator", False),
        ("triton", True),
    ]
