"""The command `runtime`: train, export, plan, kernels."""

import json
import os
import sys
import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from dayzero.runtime.errors import InputError, RunFailed, unwritable
from dayzero.runtime.malloc import start_without_thread_cache

app = typer.Typer(
    name="runtime",
    help="Train and export the model of a package that onboard wrote.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

PackageFolder = Annotated[Path, typer.Argument(help="generated/NAME, which onboard wrote", metavar="PACKAGE")]
Json = Annotated[bool, typer.Option("--json", help="One JSON object as the last line of the output")]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="A setting of train.yaml, e.g. train.steps=400")
]


@app.command()
def train(
    package: PackageFolder,
    data: Annotated[Path | None, typer.Option("--data", help="Training examples, JSON lines")] = None,
    eval_data: Annotated[Path | None, typer.Option("--eval-data", help="Held-out examples, JSON lines")] = None,
    nproc: Annotated[int, typer.Option("--nproc", min=1, help="Processes to start on this machine")] = 1,
    run: Annotated[
        Path | None, typer.Option("--run", "--run-dir", help="Folder of the run; else runs/NAME-TIME")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the run from its last good checkpoint")] = False,
    checkpoint: Annotated[
        Path | None, typer.Option("--checkpoint", help="Where the weights are, if not where onboard found them")
    ] = None,
    restarts: Annotated[int, typer.Option("--restarts", min=0, help="Restarts by itself after a crash")] = 0,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Fine-tune: LoRA or full, on one process or many."""
    from dayzero.runtime import launch
    from dayzero.runtime.job import prepare
    from dayzero.runtime.metrics import summarise

    if resume and run is None:
        raise InputError("--resume", found="no --run", expected="--run DIR, the folder of the run to continue")
    if nproc > 1 and launch.launched():
        raise InputError("--nproc", found=str(nproc), expected="left out: a launcher has started the processes")
    if nproc > 1:
        launch.start_server()
    folder = run or Path("runs") / f"{package.resolve().name}-{time.strftime('%Y%m%d-%H%M%S')}"
    first = os.environ.get("RANK", "0") == "0"
    job = prepare(
        package,
        data=data,
        eval_data=eval_data,
        run=folder,
        world=launch.world_size(nproc),
        overrides=settings or [],
        checkpoint=checkpoint,
        resume=resume,
        write=first,
    )
    launch.run(job, nproc, restarts)
    if first:
        summary = {"command": "train", "ok": True, "run": str(folder), **summarise(folder)}
        print(json.dumps(summary) if as_json else f"done: {folder}")


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Folder of a run", metavar="RUN")],
    out: Annotated[Path, typer.Option("-o", "--out", help="New folder for the result", metavar="DIR")],
    best: Annotated[bool, typer.Option("--best", help="The step with the lowest held-out loss, not the last")] = False,
    adapter: Annotated[bool, typer.Option("--adapter", help="A PEFT adapter instead of a whole model")] = False,
    merge: Annotated[bool, typer.Option("--merge/--no-merge", help="Merge adapters into the weights")] = True,
    requantise: Annotated[
        bool, typer.Option("--requantise", help="Round trained weights to the source's quantised format again")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write what a run trained under the names of the original checkpoint, or as a PEFT adapter."""
    from dayzero.runtime.export import export as write

    report = write(run, out, merged=merge and not adapter, adapter=adapter, requantise=requantise, best=best)
    if as_json:
        print(json.dumps({"command": "export", "ok": True, **report.model_dump(mode="json")}))
    else:
        print(
            f"{report.kind} of step {report.step}: {report.tensors} tensors, {report.changed} changed, in {report.out}"
        )
        if report.requantised:
            rounding = f"by {report.worst_rounding:.1%} at most"
            print(f"{report.requantised} weights rounded to the source's quantised format again, {rounding}")


@app.command()
def plan(
    package: PackageFolder,
    devices: Annotated[int, typer.Option("--devices", min=1, help="Devices in all")],
    hbm: Annotated[float | None, typer.Option("--hbm", min=1, help="Memory of a device, GiB")] = None,
    tp: Annotated[
        int | None, typer.Option("--tp", min=1, help="Devices that cut every dense layer; default parallel.tp")
    ] = None,
    cp: Annotated[
        int | None, typer.Option("--cp", min=1, help="Devices that share a batch's tokens; default parallel.cp")
    ] = None,
    settings: Settings = None,
    as_json: Json = False,
) -> None:
    """Predict memory and communication on any number of devices, without having them."""
    from dayzero.runtime.config import load_config
    from dayzero.runtime.package import load_package
    from dayzero.runtime.plan import plan_for

    made = load_package(package)
    file = package / "train.yaml"
    config = load_config(file if file.is_file() else None, settings or [])
    result = plan_for(made.spec, config, devices, hbm, tp, cp)
    if as_json:
        print(json.dumps({"command": "plan", "ok": True, **result.model_dump(mode="json")}))
    else:
        result.render(Console())


@app.command()
def kernels(as_json: Json = False) -> None:
    """List the operators, and which backend a typical call goes to here, and why."""
    from dayzero.runtime.kernel_report import report, table

    rows = report()
    if as_json:
        print(json.dumps({"command": "kernels", "ok": True, "operators": rows}))
    else:
        Console().print(table(rows))


def main() -> None:
    """Entry point. Exit codes: 0 good, 1 the run failed, 2 bad input or usage, 130 interrupted."""
    as_json = "--json" in sys.argv
    command = next((word for word in sys.argv[1:] if not word.startswith("-")), "")
    if command == "train":
        start_without_thread_cache()
    try:
        app()
    except InputError as error:
        _end(command, str(error), 2, as_json)
    except RunFailed as error:
        _end(command, str(error), error.code, as_json)
    except (KeyboardInterrupt, SystemExit) as error:  # typer turns the first into an exit with 130
        if isinstance(error, SystemExit) and error.code != 130:
            raise
        _end(command, "interrupted", 130, as_json)
    except OSError as error:
        _end(command, str(unwritable(error)), 2, as_json)


def _end(command: str, text: str, code: int, as_json: bool) -> None:
    same_on_all_ranks = code in (2, 130)
    if os.environ.get("RANK", "0") == "0" or not same_on_all_ranks:
        print(f"error: {text}" if code != 130 else text, file=sys.stderr)
    if as_json and os.environ.get("RANK", "0") == "0":
        print(json.dumps({"command": command, "ok": False, "error": text}))
    sys.exit(code)


if __name__ == "__main__":
    main()
