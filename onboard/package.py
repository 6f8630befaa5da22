"""Work on a package that is there already: align it again, check that it is as generated."""

from collections.abc import Callable
from pathlib import Path

import yaml
from pydantic import ValidationError

from dayzero.onboard.agent import climb, read_lock, specify_checkpoint
from dayzero.onboard.align import Alignment
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.classify import Ledger
from dayzero.onboard.composition import NotProven
from dayzero.onboard.generate import VERSION, render_package
from dayzero.onboard.install import LINK, compare, install, read_decisions
from dayzero.onboard.report import Findings
from dayzero.onboard.specify import Tried
from dayzero.runtime.config import load_config
from dayzero.runtime.errors import InputError
from dayzero.runtime.load import check_same_checkpoint
from dayzero.runtime.package import load_package
from dayzero.runtime.plan import read_plan


def align_package(folder: Path, checkpoint: Path | None, tell: Callable[[str], None]) -> tuple[Alignment, list[Tried]]:
    """Specifies the package's checkpoint again, climbs the ladder, rewrites the package with the new figures.

    Raises InputError if the checkpoint is another one, or if the package is not what its checkpoint gives.
    """
    read_lock(folder)
    package = load_package(folder, checkpoint)
    if package.checkpoint is None:
        raise InputError(
            str(folder / LINK), found="no link to the checkpoint", expected="its folder", hint="Give --checkpoint PATH."
        )
    source = read_checkpoint(package.checkpoint)
    check_same_checkpoint(source.path, source.headers, package.spec.checkpoint)
    try:
        specification, ledger = specify_checkpoint(source, package.spec.name, read_decisions(folder), tell)
    except NotProven as error:
        raise InputError(str(folder), found=str(error), expected="a checkpoint that can be proven again") from None
    if specification.spec != package.spec:
        raise InputError(
            str(folder / "spec.json"),
            found="another model than the checkpoint gives",
            expected="what onboard wrote",
            hint="Was it edited, or made by another version? Run onboard again.",
        )
    alignment = climb(source, specification, ledger, tell)
    findings = Findings(
        interventions=specification.interventions, ignored_config=read_decisions(folder).get("ignore_config") or {}
    )
    files = render_package(
        specification.spec,
        ledger,
        read_plan(folder / "plan.yaml"),
        load_config(folder / "train.yaml"),
        findings,
        alignment.bounded(),
    )
    install(folder, files, source.path)
    return alignment, specification.tried


def check_package(folder: Path) -> list[str]:
    """Renders the package again from what it recorded and compares every byte: one line a difference, [] for none.

    With the checkpoint at hand, its headers are compared too. Raises InputError for a package of another version.
    """
    lock = read_lock(folder)
    if lock.get("version") != VERSION:
        raise InputError(
            str(folder / "onboard.lock"),
            found=f"written by version {lock.get('version')}",
            expected=f"version {VERSION}, which this is",
            hint="Run onboard again.",
        )
    try:
        package = load_package(folder)
        files = render_package(
            package.spec,
            Ledger.model_validate_json((folder / "ledger.json").read_text()),
            read_plan(folder / "plan.yaml"),
            load_config(folder / "train.yaml"),
            Findings.model_validate(lock["findings"]),
            Alignment.model_validate(lock["alignment"]),
        )
    except (ValidationError, KeyError, OSError, yaml.YAMLError, SyntaxError, ValueError) as error:
        return [f"the package cannot be read: {str(error).splitlines()[0]}"]
    differences = compare(folder, files)
    recorded = lock["files"]
    differences += [
        f"{name}: not what onboard.lock recorded"
        for name in sorted(files)
        if name in recorded and not _same(folder, name, recorded)
    ]
    if package.checkpoint is not None:
        source = read_checkpoint(package.checkpoint)
        if source.identity() != package.spec.checkpoint:
            differences.append(f"{LINK}: the checkpoint is not the one that this package was made from")
    return sorted(set(differences))


def _same(folder: Path, name: str, recorded: dict[str, str]) -> bool:
    import hashlib

    file = folder / name
    return file.is_file() and hashlib.sha256(file.read_bytes()).hexdigest() == recorded[name]
