"""A layer that no block explains and whose code cannot be copied: named, with what was found and what to do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from zoo import unseen

from dayzero.onboard.oracle import sandbox


@pytest.mark.slow
def test_a_layer_that_can_be_neither_proven_nor_lifted_is_named_and_nothing_is_written(tmp_path):
    unseen.make(tmp_path / "own", "sealed", num_hidden_layers=3)
    unsafe = ["--unsafe-no-sandbox"] if sandbox.why_not() else []
    command = [Path(sys.executable).with_name("onboard"), "own", "-o", "out", "--trust-remote-code", *unsafe]
    environment = os.environ | {"COLUMNS": "80"}
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200, env=environment)
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0] == "not onboarded: 1 thing is unproven. Nothing was written."
    assert lines[1].startswith("  model.tiers.{layer}.mixer (layers 0-2): SealedSum: no block has parameters as")
    said = " ".join(done.stdout.split())
    assert "as into, gate, back; runs sinh, cumsum, atan, cos; its own code is not copied: forward of" in said
    assert 'what to do: write a block for it ("Adding a block" in docs/architecture.md)' in said
    assert "## Adding a block" in (Path(__file__).parents[2] / "docs" / "architecture.md").read_text()
    assert [path.name for path in tmp_path.iterdir()] == ["own"]
