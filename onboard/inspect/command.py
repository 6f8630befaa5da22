"""`onboard inspect`: what is in a checkpoint, from its headers alone. No tensor is read, no code is run."""

from pathlib import Path
from typing import Any

from rich.console import Console

from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.inspect.classify import classify
from dayzero.onboard.inspect.ledger import Ledger, finite
from dayzero.runtime.errors import InputError


def inspect_checkpoint(
    path: Path, console: Console | None, tensor: str | None = None, other: Path | None = None, html: Path | None = None
) -> dict[str, Any]:
    """Reads, prints unless `console` is None, and returns what `--json` shows.

    tensor: one name to look up. other: a second checkpoint to compare with. html: a file for the picture. Raises
    InputError for a checkpoint that is none, or options that exclude each other.
    """
    if sum(option is not None for option in (tensor, other, html)) > 1:
        raise InputError("onboard inspect", found="two of --tensor, --diff, --html", expected="one of them")
    from dayzero.onboard.inspect.table import print_ledger, print_tensor

    checkpoint = read_checkpoint(path)
    ledger = classify(checkpoint)
    good = not ledger.unaccounted and not ledger.unread_config
    result = {"command": "inspect", "ok": True, "verdict": "PASS", "package": None}
    if tensor is not None:
        from dayzero.onboard.inspect.lookup import look_up

        found = look_up(ledger, checkpoint, tensor)
        if console is not None:
            print_tensor(console, found)
        return {**result, "tensor": found}
    if other is not None:
        from dayzero.onboard.inspect.diff import diff_checkpoints
        from dayzero.onboard.inspect.table import print_diff

        second = read_checkpoint(other)
        diff = diff_checkpoints(checkpoint, second, (ledger, classify(second)))
        if console is not None:
            print_diff(console, diff)
        return {**result, "same": diff.same, "diff": finite(diff.model_dump())}
    if html is not None:
        _write_html(html, checkpoint.architecture, ledger)
    if console is not None:
        print_ledger(console, checkpoint, ledger)
        if html is not None:
            console.print(f"picture: {html}", markup=False, highlight=False, soft_wrap=True)
    groups = [group.model_dump(mode="json", exclude_defaults=True) for group in ledger.groups]
    runs = [run.model_dump(mode="json") for run in ledger.layers]
    verdict = {"ok": good, "verdict": "PASS" if good else "UNVERIFIED"}
    return {**result, **verdict, **ledger.summary(), "runs": runs, "groups": groups}


def _write_html(file: Path, title: str, ledger: Ledger) -> None:
    from dayzero.onboard.inspect.html import render_inspection

    text = render_inspection(title, ledger)
    try:
        file.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(str(file), found=error.strerror or "an error", expected="a file that can be written") from None
