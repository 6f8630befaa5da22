"""The operators of a package for its lifted classes: one file each, which says what a faster one must compute."""

import hashlib
import re
from dataclasses import dataclass
from pathlib import Path

from dayzero.onboard.operators import KERNELS
from dayzero.onboard.report.layers import is_lifted, uses
from dayzero.runtime.nn import BLOCKS
from dayzero.runtime.spec import ModelSpec


@dataclass
class LiftedOperator:
    """name: of its file, without .py. lifted: the class. uses: one line for each place of the model that has it; lines:
    what it computes."""

    name: str
    lifted: str
    uses: list[str]
    lines: list[str]


def operator_files(spec: ModelSpec) -> dict[str, str]:
    """Lifted class -> the name of its operator: in small letters, and none that a kernel or another one has."""
    blocks = [inner for block in spec.blocks() for inner in block.walk()]
    classes = [b.arguments["module"] for b in blocks if getattr(BLOCKS[b.block], "holds_lifted", False)]
    found: dict[str, str] = {}
    for name in dict.fromkeys(classes):
        words = re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", name).lower()
        while words in {*found.values(), *KERNELS}:
            words += "_lifted"
        found[name] = words
    return found


def lifted_operators(spec: ModelSpec) -> list[LiftedOperator]:
    """One for each lifted class that the model is built of."""
    found = []
    for lifted, name in operator_files(spec).items():
        places: list[str] = []
        lines: list[str] = []
        for block, where in uses(spec):
            inside = [inner.arguments.get("module") for inner in block.walk()]
            if is_lifted(block) and lifted in inside and block.proof is not None:
                places.append(f"{where} ({block.proof.module.rstrip('.')})")
                lines = lines or block.proof.computes.get(lifted, [])
        found.append(LiftedOperator(name, lifted, places, lines))
    return found


def custom_operators(folder: Path | None, spec: ModelSpec) -> dict[str, str]:
    """File of every lifted class of the model, as "custom/NAME.py" -> sha256 of what stands in `folder` for it, "" for
    nothing."""
    files = [] if folder is None else [folder / f"{name}.py" for name in operator_files(spec).values()]
    held = {file.name: file.read_bytes() if file.is_file() else None for file in files}
    return {f"custom/{n}": "" if text is None else hashlib.sha256(text).hexdigest() for n, text in held.items()}
