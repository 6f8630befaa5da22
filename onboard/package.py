"""Work on a package that is there already: align it again, check that it is as generated."""

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import ValidationError

from dayzero.onboard.align import Alignment
from dayzero.onboard.align.climb import climb
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.generate import LOCK, VERSION, render_package, templates_sha256
from dayzero.onboard.inspect.classify import Ledger
from dayzero.onboard.install import LINK, compare, install, read_decisions, read_lock
from dayzero.onboard.lifted_operators import custom_operators
from dayzero.onboard.prove.proven import NotProven
from dayzero.onboard.report.report import Findings
from dayzero.onboard.specify import Tried
from dayzero.onboard.specify_checkpoint import specify_checkpoint
from dayzero.runtime.config import load_config
from dayzero.runtime.custom_operators import SMALL
from dayzero.runtime.errors import InputError
from dayzero.runtime.load import check_same_checkpoint
from dayzero.runtime.package import load_package
from dayzero.runtime.plan import read_plan
from dayzero.runtime.recorded_hashes import read_hashes
from dayzero.runtime.spec import ModelSpec


def align_package(
    folder: Path,
    checkpoint: Path | None,
    tell: Callable[[str], None],
    look: Callable[[list[Tried]], None] = lambda tried: None,
) -> tuple[Alignment, list[Tried]]:
    """Specifies the package's checkpoint again, climbs the ladder, rewrites the package with the new figures.

    look: is shown what was tried for every module before the ladder; what it raises stops here, with nothing rewritten.
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
    look(specification.tried)
    alignment = climb(source, specification, ledger, tell, custom=folder / "custom")
    findings = Findings(
        interventions=specification.interventions,
        claims=specification.claims,
        replaced=specification.replaced,
        ignored_config=read_decisions(folder).get("ignore_config") or {},
        custom=custom_operators(folder / "custom", specification.spec),
    )
    files = render_package(
        specification.spec,
        ledger,
        read_plan(folder / "plan.yaml"),
        load_config(folder / "train.yaml"),
        findings,
        alignment.bounded(),
        specification.shrunk,
    )
    install(folder, files, source.path)
    return alignment, specification.tried


def check_package(folder: Path) -> list[str]:
    """Renders the package again from what it recorded and compares every byte: one line a difference, [] for none.

    Nothing of the package is run. With the checkpoint at hand, its headers are compared too. Raises InputError for a
    package of another version, or one whose lock cannot be read.
    """
    lock = read_lock(folder)
    if lock.get("version") != VERSION:
        raise InputError(
            str(folder / LOCK),
            found=f"written by version {lock.get('version')}",
            expected=f"version {VERSION}, which this is",
            hint="Run onboard again.",
        )
    if lock.get("templates_sha256") != templates_sha256():
        return [f"{LOCK}: written by other templates than these; run onboard again"]
    try:
        recorded = {name: str(digest) for name, digest in lock["files"].items()}
        findings, aligned = Findings.model_validate(lock["findings"]), Alignment.model_validate(lock["alignment"])
    except (ValidationError, KeyError, AttributeError):
        return [f"{LOCK}: not what onboard writes"]
    differences = {name: line for name, digest in recorded.items() if (line := _difference(folder, name, digest))}
    if not differences.keys() & set(_RENDERED_FROM):
        try:
            spec = ModelSpec.model_validate_json((folder / "spec.json").read_bytes())
            ledger = Ledger.model_validate_json((folder / "ledger.json").read_bytes())
            plan, train = read_plan(folder / "plan.yaml"), load_config(folder / "train.yaml")
            small = ModelSpec.model_validate_json((folder / SMALL).read_bytes()) if SMALL in recorded else None
            hashes = read_hashes(folder, [rule.build() for rule in spec.rules])
        except (ValidationError, OSError) as error:
            return [f"{LOCK}: lists files that onboard does not write ({str(error).splitlines()[0]})"]
        alignment = aligned.model_copy(update={"hashes": hashes})
        files = render_package(spec, ledger, plan, train, findings, alignment, small)
        differences |= {line.split(":")[0]: line for line in compare(folder, files)}
        differences |= _not_aligned(findings.custom, custom_operators(folder / "custom", spec))
        if (folder / LINK).is_dir() and read_checkpoint(folder / LINK).identity() != spec.checkpoint:
            differences[LINK] = f"{LINK}: not the checkpoint that this package was made from"
    return [differences[name] for name in sorted(differences)]


_RENDERED_FROM = ("spec.json", "ledger.json", "hashes.json", "plan.yaml", "train.yaml", SMALL)


def _not_aligned(aligned: Mapping[str, str], found: Mapping[str, str]) -> dict[str, str]:
    """A line for each hand-written operator that is not the one that the ladder was climbed with."""
    wrong = [name for name, there in found.items() if there != aligned.get(name, "")]
    what = {name: "not what was aligned" if found[name] else "not there any more" for name in wrong}
    return {name: f"{name}: {what[name]}; run onboard align" for name in wrong}


def _difference(folder: Path, name: str, recorded: str) -> str:
    """What is wrong with a file by the digest that the lock recorded, "" for nothing."""
    if not (folder / name).is_file():
        return f"{name}: missing"
    found = hashlib.sha256((folder / name).read_bytes()).hexdigest()
    return "" if found == recorded else f"{name}: changed (sha256 {found[:12]}, {LOCK} has {recorded[:12]})"
