"""Packages of families of the conformance field that train on the examples of tests/examples.py."""

from pathlib import Path

import handmade
import pytest
import tiny
from zoo import families
from zoo.conformance import write_checkpoint

from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.specify_checkpoint import specify_checkpoint


def package(family: str, folder: Path) -> Path:
    """folder/package, over a checkpoint whose vocabulary is that of the tokenizer beside it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(families.SIZES, "vocab_size", tiny.VOCABULARY)
        checkpoint = write_checkpoint(family, folder / "checkpoint")
    tiny.load("demo/checkpoint.py").tiny_tokenizer(tiny.VOCABULARY).save_pretrained(checkpoint)
    specification, ledger = specify_checkpoint(read_checkpoint(checkpoint), family, {}, lambda line: None)
    assert ledger.unaccounted == []
    return handmade.write_package(specification.spec, checkpoint, folder / "package")
