"""Loading on the ranks of tests/harness.py."""

from pathlib import Path

import torch

from dayzero.runtime.errors import InputError
from dayzero.runtime.headers import read_headers
from dayzero.runtime.load import load_checkpoint
from dayzero.runtime.package import load_package
from dayzero.runtime.parallel import Layout, make_meshes, parallelise


def load(package: Path, layout: tuple[int, int, int], checkpoint: Path, hashes: dict[str, str]) -> str:
    """What loading said: "" where the content is what the hashes say."""
    made = load_package(package)
    with torch.device("meta"):
        model = made.build()
    parallelise(model, make_meshes(Layout(*layout), "cpu"))
    model.to_empty(device="cpu")
    try:
        load_checkpoint(model, made.rules, checkpoint, read_headers(checkpoint), hashes=hashes)
    except InputError as error:
        return str(error)
    return ""
