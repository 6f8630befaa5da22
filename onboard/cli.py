"""The command `onboard`: run, inspect, plan, generate, align, check, report."""

import difflib
import json
import math
import os
import re
import shutil
import sys
import textwrap
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table
from typer.core import TyperGroup

from dayzero.runtime.errors import InputError, RunFailed, unwritable


class _RunByDefault(TyperGroup):
    """`onboard PATH` is `onboard run PATH`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        first = next((arg for arg in args if not arg.startswith("-")), None)
        if first is not None and first not in self.commands and not {"--help", "-h"} & set(args[: args.index(first)]):
            near = difflib.get_close_matches(first, self.commands, 1, 0.75)
            if near and not Path(first).exists():
                expected = "a command, or the folder of a checkpoint"
                raise InputError(first, found="neither", expected=expected, hint=f"Did you mean {near[0]}?")
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="onboard",
    cls=_RunByDefault,
    help="Read a checkpoint, prove an adapter for it, and write generated/NAME. `onboard PATH` is `onboard run PATH`.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

CheckpointFolder = Annotated[Path, typer.Argument(help="Folder with config.json and safetensors", metavar="CHECKPOINT")]
PackageFolder = Annotated[Path, typer.Argument(help="generated/NAME, which onboard wrote", metavar="PACKAGE")]
Out = Annotated[Path, typer.Option("-o", "--out", help="Folder for packages", metavar="DIR")]
Name = Annotated[str | None, typer.Option("--name", help="Name of the package; the checkpoint folder's if left out")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of the output")]
Devices = Annotated[int, typer.Option("--devices", min=1, help="Devices that the plan is for")]
Hbm = Annotated[float, typer.Option("--hbm", min=1, help="Memory of one device, GiB")]
Trust = Annotated[
    bool, typer.Option("--trust-remote-code", help="The reference is the checkpoint's own code, run in a sandbox")
]
Unsafe = Annotated[bool, typer.Option("--unsafe-no-sandbox", help="Run that code as yourself, without a sandbox")]


class Verdict(Exception):
    """The tool did its work and the verdict is bad: exit code 1."""


def package_name(checkpoint: Path, name: str | None) -> str:
    """The name given, or one made of the folder's: lower case, words joined by `_`. Raises InputError for a bad one."""
    if name is None:
        name = re.sub(r"[^a-z0-9]+", "_", checkpoint.resolve().name.lower()).strip("_") or "model"
        return name if name[0].isalpha() else f"model_{name}"
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name):
        raise InputError("--name", found=repr(name), expected="letters, digits and _, starting with a letter")
    return name


@app.command()
def run(
    checkpoint: CheckpointFolder,
    out: Out = Path("generated"),
    name: Name = None,
    devices: Devices = 8,
    hbm: Hbm = 64.0,
    trust: Trust = False,
    unsafe: Unsafe = False,
    as_json: Json = False,
) -> None:
    """The whole way: ledger, proofs, plan, alignment, package and report."""
    _run("run", checkpoint, out, name, devices, hbm, as_json, trust, unsafe, align=True)


@app.command()
def generate(
    checkpoint: CheckpointFolder,
    out: Out = Path("generated"),
    name: Name = None,
    devices: Devices = 8,
    hbm: Hbm = 64.0,
    trust: Trust = False,
    unsafe: Unsafe = False,
    as_json: Json = False,
) -> None:
    """Proofs and package without the alignment ladder; `onboard align` climbs it later."""
    _run("generate", checkpoint, out, name, devices, hbm, as_json, trust, unsafe, align=False)


def _run(
    command: str,
    checkpoint: Path,
    out: Path,
    name: str | None,
    devices: int,
    hbm: float,
    as_json: bool,
    trust: bool,
    unsafe: bool,
    align: bool,
) -> None:
    from dayzero.onboard.agent import Outcome, Run, execute
    from dayzero.onboard.by_rules import NOTICE
    from dayzero.onboard.install import refuse_foreign
    from dayzero.onboard.progress import show

    request = Run(checkpoint, out, package_name(checkpoint, name), devices, hbm, align)
    refuse_foreign(request.target)
    events = execute(request)
    if _confined(request.read(), trust, unsafe):
        from dayzero.onboard.oracle.confined import execute_confined

        events = execute_confined(request, unsafe)
    outcome = show(events, Console(stderr=True))
    assert isinstance(outcome, Outcome)
    if outcome.unproven:
        _print_unproven(outcome.unproven)
        _last_line(as_json, {"command": command, "ok": False, "verdict": "UNPROVEN", "unproven": outcome.unproven})
        raise Verdict
    verdict = outcome.alignment.verdict if align else "UNVERIFIED"
    ok = not outcome.unverified and (verdict in {"PASS", "WARN"} or not align)
    if outcome.unverified:
        print(NOTICE)
    _print_alignment(outcome.alignment)
    print(f"{outcome.package}: {verdict}")
    print(f"read {outcome.package / 'REPORT.md'}, or open report.html beside it")
    result = _alignment_json(outcome.alignment)
    assert outcome.ledger is not None
    summary = {"package": str(outcome.package), **outcome.ledger.summary()}
    _last_line(as_json, {"command": command, "ok": ok, "verdict": verdict, **result, **summary})
    if not ok:
        raise Verdict


def _confined(checkpoint: Any, trust: bool, unsafe: bool) -> bool:
    """Whether the checkpoint's own code is the reference, and so is to run in a sandbox."""
    from dayzero.onboard.oracle import sandbox
    from dayzero.onboard.oracle.remote_code import remote_code

    if unsafe and not trust:
        raise InputError("--unsafe-no-sandbox", expected="--trust-remote-code with it: without code there is no danger")
    if not trust or remote_code(checkpoint.path, checkpoint.config) is None:
        return False
    sandbox.check(unsafe)
    return True


@app.command()
def inspect(
    checkpoint: CheckpointFolder,
    tensor: Annotated[str | None, typer.Option("--tensor", help="One tensor: role, fate, shape, bytes")] = None,
    diff: Annotated[Path | None, typer.Option("--diff", help="Another checkpoint: what changed", metavar="DIR")] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a picture of it", metavar="FILE")] = None,
    as_json: Json = False,
) -> None:
    """What is in a checkpoint, from its headers alone: no tensor is read, no code is run.

    Ends with 1 where a tensor's role or the meaning of a config field is unknown.
    """
    from dayzero.onboard.inspect.command import inspect_checkpoint

    result = inspect_checkpoint(checkpoint, None if as_json else Console(), tensor, diff, html)
    _last_line(as_json, result)
    if not result["ok"]:
        raise Verdict


@app.command()
def plan(
    source: Annotated[Path, typer.Argument(help="A checkpoint, or a package", metavar="CHECKPOINT|PACKAGE")],
    devices: Devices = 8,
    hbm: Hbm = 64.0,
    mode: Annotated[str, typer.Option("--mode", help="lora or full")] = "lora",
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="Tokens of one device's batch")] = 4096,
    trust: Trust = False,
    unsafe: Unsafe = False,
    as_json: Json = False,
) -> None:
    """Mesh, memory and communication on a cluster of this size."""
    from dayzero.runtime.plan import make_plan

    if mode not in {"lora", "full"}:
        raise InputError("--mode", found=mode, expected="lora or full")
    made = make_plan(
        _spec_of(source, trust, unsafe),
        devices=devices,
        hbm_gib=hbm,
        mode="lora" if mode == "lora" else "full",
        tokens_per_device=tokens,
    )
    if as_json:
        _last_line(
            True,
            {
                "command": "plan",
                "ok": made.fits,
                "verdict": "PASS" if made.fits else "FAIL",
                **made.model_dump(mode="json"),
            },
        )
    else:
        made.render(Console())
    if not made.fits:
        raise Verdict


def _spec_of(source: Path, trust: bool, unsafe: bool) -> Any:
    """The specification of a package, or of a checkpoint, proven now."""
    from dayzero.onboard.by_rules import NOTICE
    from dayzero.onboard.checkpoint import read_checkpoint
    from dayzero.onboard.prove.proven import NotProven
    from dayzero.onboard.specify_checkpoint import specify_checkpoint

    if (source / "spec.json").is_file():
        from dayzero.runtime.package import load_package

        return load_package(source).spec
    checkpoint, name = read_checkpoint(source), package_name(source, None)
    try:
        if _confined(checkpoint, trust, unsafe):
            from dayzero.onboard.oracle.confined import specify_confined

            return specify_confined(source, name, lambda line: None, unsafe)
        spec = specify_checkpoint(checkpoint, name, {}, lambda line: None)[0].spec
        if spec.unverified:
            print(NOTICE, file=sys.stderr)
        return spec
    except NotProven as error:
        _print_unproven([vars(item) for item in error.unproven])
        raise Verdict from None


@app.command()
def align(
    package: PackageFolder,
    checkpoint: Annotated[Path | None, typer.Option("--checkpoint", help="Where the checkpoint is now")] = None,
    explain: Annotated[str | None, typer.Option("--explain", help="Show the candidates tried for a module")] = None,
    trust: Trust = False,
    unsafe: Unsafe = False,
    as_json: Json = False,
) -> None:
    """Proves a package again from its checkpoint, climbs the ladder, and rewrites its reports."""
    from dayzero.onboard.checkpoint import read_checkpoint
    from dayzero.onboard.package import align_package

    def tell(line: str) -> None:
        Console(stderr=True).print(line, highlight=False, markup=False)

    source = checkpoint or package / "checkpoint"
    if trust and source.is_dir() and _confined(read_checkpoint(source), trust, unsafe):
        from dayzero.onboard.oracle.confined import align_confined

        alignment, tried = align_confined(package, source, tell, unsafe)
        _explain(tried, explain)
    else:
        alignment, _ = align_package(package, checkpoint, tell, lambda tried: _explain(tried, explain))
    _print_alignment(alignment, details=True)
    ok = alignment.verdict in {"PASS", "WARN"}
    result = _alignment_json(alignment)
    _last_line(as_json, {"command": "align", "ok": ok, "verdict": alignment.verdict, "package": str(package), **result})
    if not ok:
        raise Verdict


def _explain(tried: list[Any], module: str | None) -> None:
    if module is None:
        return
    # Only layers of the small model were looked at: any layer's number stands for those of its like. "layer.3.mlp" is
    # as good as "layers.3.mlp", and as "tiers.3.mlp" where the layers are called that.
    pattern = re.sub(r"\d+", r"\\d+", re.escape(module)).replace(r"\.\d+", r"s?\.\d+")
    chosen = [item for item in tried if module in item.module] or [t for t in tried if re.search(pattern, t.module)]
    if not chosen and (part := re.fullmatch(r"(?:.*\.)?layers?\.\d+(\..+)?", module)):
        chosen = [t for t in tried if re.search(rf"\.\d+{re.escape(part[1] or '')}", t.module)]
    if not chosen:
        raise InputError("--explain", found=module, expected="one of: " + ", ".join(item.module for item in tried))
    for item in chosen:
        of = f"{item.candidates} candidate" + "s" * (item.candidates != 1)
        print(_plain(f"{item.module}: {item.block} of {of}, {item.error:.1e} ({item.where})"))
        if item.why:
            print(_plain(f"  {item.why}"))
        if item.bound:
            print(_plain(f"  {item.bound}"))
        for miss, times in Counter(item.misses).items():
            print(_plain(f"  not {miss}" + (f" ({times} alike)" if times > 1 else "")))


@app.command()
def check(package: PackageFolder, as_json: Json = False) -> None:
    """Regenerates a package into a temporary folder and compares byte for byte."""
    from dayzero.onboard.package import check_package

    differences = check_package(package)
    for line in differences:
        print(line)
    if not differences:
        print(f"{package}: as generated")
    verdict = "FAIL" if differences else "PASS"
    result = {"command": "check", "ok": not differences, "verdict": verdict, "package": str(package)}
    _last_line(as_json, {**result, "differences": differences})
    if differences:
        raise Verdict


@app.command()
def report(package: PackageFolder, as_json: Json = False) -> None:
    """Prints a package's report, and where the HTML one is."""
    from dayzero.onboard.install import read_lock

    lock = read_lock(package)
    text = (package / "REPORT.md").read_text() if (package / "REPORT.md").is_file() else ""
    if not text:
        raise InputError(
            str(package / "REPORT.md"), found="no such file", expected="a report", hint="Run onboard again."
        )
    if as_json:
        from dayzero.onboard.align import Alignment

        alignment = Alignment.model_validate(lock["alignment"])
        result = {"command": "report", "ok": True, "verdict": alignment.verdict, "package": str(package)}
        _last_line(True, {**result, **_alignment_json(alignment)})
        return
    from rich.markdown import Markdown

    console = Console()
    console.print(Markdown(text) if console.is_terminal else text, markup=False)
    console.print(f"open {package / 'report.html'}", highlight=False)


def _print_alignment(alignment: Any, details: bool = False) -> None:
    table = Table("rung", "verdict", "worst", "threshold", "where", box=None, pad_edge=False)
    for name, rung in alignment.rungs.items():
        table.add_row(name, rung.verdict, f"{rung.worst:.1e}", f"{rung.threshold:.0e}", rung.where)
    if alignment.rungs:
        Console().print(table)
    if details:
        for rung in alignment.rungs.values():
            if rung.verdict != "PASS":
                for line in rung.details:
                    print(f"  {line}")


def _alignment_json(alignment: Any) -> dict[str, Any]:
    rungs = {
        name: {
            "verdict": r.verdict,
            "worst": r.worst if math.isfinite(r.worst) else None,
            "threshold": r.threshold,
            "where": r.where,
        }
        for name, r in alignment.rungs.items()
    }
    return {"rungs": rungs, "blocks": alignment.blocks}


def _print_unproven(unproven: list[dict[str, Any]]) -> None:
    """Each thing with what was found; what can be done about several is said once."""
    are = "1 thing is" if len(unproven) == 1 else f"{len(unproven)} things are"
    print(f"not onboarded: {are} unproven. Nothing was written.")
    for item in unproven:
        paths = [item["where"], *item.get("also", [])]
        layers = item.get("layers")
        if layers:
            paths = [re.sub(r"\.\d+(?=\.|$)", ".{layer}", path, count=1) for path in paths]
        where = ", ".join(dict.fromkeys(paths))
        if layers:
            where += f" (layer {layers})" if layers.isdecimal() else f" (layers {layers})"
        _wrapped(f"{_plain(where)}: {_plain(item['why'])}", "  ", "    ")
        for line in item["tried"]:
            _wrapped(f"tried {_plain(line)}", "    ", "      ")
    for todo in dict.fromkeys(item.get("todo") for item in unproven):
        if todo:
            _wrapped(f"what to do: {_plain(todo)}", "", "  ")


def _wrapped(text: str, first: str, rest: str) -> None:
    width = max(60, min(120, shutil.get_terminal_size().columns))
    wrap = textwrap.TextWrapper(
        width, initial_indent=first, subsequent_indent=rest, break_long_words=False, break_on_hyphens=False
    )
    print(wrap.fill(text))


def _plain(text: str) -> str:
    """Text of a checkpoint that cannot steer a terminal: in quotes, escaped, if it holds more than plain characters."""
    return text if text.isprintable() else repr(text)


def _last_line(as_json: bool, value: dict[str, Any]) -> None:
    if as_json:
        print(json.dumps(value, allow_nan=False, default=str))


def main() -> None:
    """Entry point. Exit codes: 0 good, 1 the verdict is bad, 2 bad input or usage, 130 interrupted."""
    # Proofs run thousands of tiny products: more threads only wait for one another, and one gives the same bits
    # everywhere. What is large asks for the others itself.
    # What transformers advises is about kernels that the reference could be faster with.
    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    if sys.argv[1:2] != ["inspect"]:  # which computes nothing, and is done in the time that torch takes to import
        import torch

        torch.set_num_threads(1)
    as_json = "--json" in sys.argv
    try:
        app()
    except InputError as error:
        _end(str(error), 2, as_json)
    except RunFailed as error:
        _end(str(error), error.code, as_json)
    except Verdict:
        sys.exit(1)
    except (KeyboardInterrupt, SystemExit) as error:  # typer turns the first into an exit with 130
        if isinstance(error, SystemExit) and error.code != 130:
            raise
        _end("interrupted; the same command goes on where this one stopped", 130, as_json)
    except OSError as error:
        _end(str(unwritable(error)), 2, as_json)
    except ModuleNotFoundError as error:
        hint = f"needs {error.name}: pip install 'dayzero[onboard]'"
        _end(hint, 2, as_json)


def _end(text: str, code: int, as_json: bool) -> None:
    print(text if code == 130 else f"error: {text}", file=sys.stderr)
    if as_json:
        names = {command.name or command.callback.__name__ for command in app.registered_commands if command.callback}
        command = next((word for word in sys.argv[1:] if word in names), "run")
        print(json.dumps({"command": command, "ok": False, "verdict": "ERROR", "package": None, "error": text}))
    sys.exit(code)
