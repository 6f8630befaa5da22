"""Checkpoints beyond what can be proven: a list of what is open, exit code 1, and nothing written."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from zoo.conformance import write_checkpoint


@pytest.mark.slow
def test_the_list_says_where_and_nothing_is_written(tmp_path):
    """An architecture without a reference: nobody has its code, and its config is silent where rules must know."""
    folder = write_checkpoint("mixtral", tmp_path / "checkpoint")
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["NobodyForCausalLM"], "model_type": "nobody"}
    (folder / "config.json").write_text(json.dumps(config))
    command = [Path(sys.executable).with_name("onboard"), "checkpoint", "-o", "out", "--json"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=200)
    assert done.returncode == 1, done.stderr
    assert "Traceback" not in done.stderr
    verdict = json.loads(done.stdout.splitlines()[-1])
    assert (verdict["ok"], verdict["verdict"]) == (False, "UNPROVEN")
    silent = ("rms_norm_eps", "norm_topk_prob", "hidden_act", "rope_theta")
    assert [item["where"] for item in verdict["unproven"]] == ["config.json", *(f"config.json: {x}" for x in silent)]
    assert f"not onboarded: {len(verdict['unproven'])} " in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]
