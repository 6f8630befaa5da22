"""Checkpoints beyond what can be proven: a list of what is open, exit code 1, and nothing written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from zoo.conformance import write_checkpoint

# Families of the conformance field, and where the first open thing stands. A row moves out when it is onboarded.
BEYOND = {
    "inkling2_loop": "structure",  # layers that run several times
}


@pytest.mark.parametrize("family", BEYOND)
def test_the_list_says_where_and_nothing_is_written(family, tmp_path):
    write_checkpoint(family, tmp_path / "checkpoint")
    command = [Path(sys.executable).with_name("onboard"), "checkpoint", "-o", "out", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert (verdict["ok"], verdict["verdict"]) == (False, "UNPROVEN")
    assert BEYOND[family] in [item["where"] for item in verdict["unproven"]]
    assert f"not onboarded: {len(verdict['unproven'])} " in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
