"""Specifications of small models whose layers are unlike the usual ones, as onboarding found them, without rules.

tests/data/specs/NAME.json; written again by `python tests/odd_specs.py NAME...`, which onboards those families.
"""

import json
import sys
from pathlib import Path
from typing import Any

from dayzero.runtime.spec import CheckpointId, ModelSpec

FOLDER = Path(__file__).parent / "data" / "specs"
NO_CHECKPOINT = CheckpointId(architecture="", config_sha256="", headers_sha256="", tensors=0, bytes=0, dtypes={})
NAMES = {file.stem for file in FOLDER.glob("*.json")}


def read(name: str) -> ModelSpec:
    return ModelSpec.model_validate_json((FOLDER / f"{name}.json").read_text())


def has_experts(spec: ModelSpec) -> bool:
    return any(inner.block == "Experts" for block in spec.blocks() for inner in block.walk())


def write(spec: ModelSpec) -> None:
    """One layer of each kind; no rules, no proofs."""
    data = spec.one_of_each_kind()[0].model_dump(mode="json")
    (FOLDER / f"{spec.name}.json").write_text(json.dumps(_without_proofs(data), indent=1) + "\n")


def _without_proofs(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_proofs(held) for name, held in value.items() if name != "proof"}
    return [_without_proofs(held) for held in value] if isinstance(value, list) else value


def main(names: list[str]) -> None:
    from zoo import families

    from dayzero.onboard.specify import specify

    for name in names:
        write(specify(families.config(name), NO_CHECKPOINT, name).spec)


if __name__ == "__main__":
    main(sys.argv[1:])
