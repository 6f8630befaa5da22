"""A generated package: the adapter of one checkpoint, as files."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydantic import ValidationError

from dayzero.runtime.errors import InputError
from dayzero.runtime.generated_code import load_module
from dayzero.runtime.nn import CausalLM
from dayzero.runtime.recorded_hashes import read_hashes
from dayzero.runtime.spec import ModelSpec
from dayzero.runtime.weights import Rule


@dataclass(frozen=True)
class Package:
    """folder: generated/<name>. build: the model on torch's current default device, parameters uninitialised.
    rules: its weight rules. checkpoint: where the weights are, None if the local link is gone. verdict: of the
    alignment that onboarding recorded, None if it recorded none. hashes: parameter -> content hash of the weights that
    were proven, None where onboarding did not read them."""

    folder: Path
    spec: ModelSpec
    build: Callable[[], CausalLM]
    rules: list[Rule]
    checkpoint: Path | None
    verdict: str | None = None
    hashes: dict[str, str] | None = None


def load_package(folder: Path, checkpoint: Path | None = None) -> Package:
    """Reads a package and imports its model.py and weights.py. `checkpoint` overrides the package's own link.

    Raises InputError where a file is missing or not valid.
    """
    spec_file = folder / "spec.json"
    if not spec_file.is_file():
        raise InputError(
            str(folder),
            found="no spec.json" if folder.is_dir() else "no such folder",
            expected="a package that onboard wrote, such as generated/NAME",
            hint="Make one with: onboard CHECKPOINT",
        )
    try:
        spec = ModelSpec.model_validate_json(spec_file.read_text())
    except ValidationError as error:
        raise InputError(
            str(spec_file), found=str(error.errors()[0]["msg"]), expected="a model specification"
        ) from None
    model, weights = load_module(folder / "model.py"), load_module(folder / "weights.py")
    link = folder / "checkpoint"
    if checkpoint is None and link.is_dir():
        checkpoint = link.resolve()
    hashes = read_hashes(folder, weights.RULES)
    return Package(folder, spec, model.build, weights.RULES, checkpoint, _verdict(folder), hashes)


def _verdict(folder: Path) -> str | None:
    """The worst verdict of the rungs in onboard.lock; UNVERIFIED where what is written by hand has changed since."""
    lock = folder / "onboard.lock"
    if not lock.is_file():
        return None
    try:
        recorded = json.loads(lock.read_text())
        rungs = recorded["alignment"]["rungs"]
        verdicts = {rung["verdict"] for rung in rungs.values()}
        aligned = recorded.get("findings", {}).get("custom", {})
        verdicts |= {"UNVERIFIED" for name, digest in aligned.items() if _sha256(folder / name) != digest}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise InputError(str(lock), found=f"no alignment ({error})", expected="what onboard wrote") from None
    return next((verdict for verdict in ("FAIL", "UNVERIFIED", "WARN", "PASS") if verdict in verdicts), None)


def _sha256(file: Path) -> str:
    """In hexadecimal, "" for no file."""
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else ""
