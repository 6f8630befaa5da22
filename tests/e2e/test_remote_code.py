"""Checkpoints with layers that nobody has seen, from their own code to a trained and exported model."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import remote_checkpoint
import tiny
from safetensors.torch import load_file

from dayzero.onboard.oracle import sandbox
from dayzero.runtime.package import load_package

pytestmark = pytest.mark.slow
CONFINED = [] if not sandbox.why_not() else ["--unsafe-no-sandbox"]


def onboard(*arguments):
    command = [sys.executable, "-m", "dayzero.onboard.cli", *map(str, arguments), "--json"]
    code = "import sys; from dayzero.onboard.cli import main; main()"
    made = subprocess.run([sys.executable, "-c", code, *command[3:]], capture_output=True, text=True)
    return made.returncode, json.loads(made.stdout.splitlines()[-1]), made.stderr


@pytest.mark.parametrize(
    ("fields", "module", "words"),
    [
        ({}, "OwnMixer", ["fading_sum", "CLAMP = 4.0"]),
        ({"residual": "turned"}, "OwnLayer_around_before_between_wide", ["torch.tanh"]),
        ({"num_experts": 6, "num_experts_per_tok": 2}, "OwnRouter", ["1.0 / (1.0 +"]),
    ],
    ids=["a new mixer", "a new residual", "a new mixer and a new router"],
)
def test_a_layer_never_seen_is_copied_and_the_rest_is_proven(tmp_path, fields, module, words):
    tokenizer = tiny.make("llama", tmp_path / "tokenizer")
    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    checkpoint = remote_checkpoint.make(tmp_path / "own", vocab_size=vocabulary, **fields)
    for file in tokenizer.glob("*token*.json"):
        shutil.copy(file, checkpoint)
    code, result, said = onboard("run", checkpoint, "-o", tmp_path, "--name", "made", "--trust-remote-code", *CONFINED)
    assert (code, result["verdict"]) == (0, "PASS"), said
    # Equal norms are one block; with experts only their router and the mixer are not proven.
    proven, lifted = (2, 2) if module == "OwnRouter" else (3, 1)
    assert result["blocks"] == {"proven": proven, "lifted": lifted, "unverified": 0}
    package = load_package(tmp_path / "made")
    inside = [inner for block in package.spec.blocks() for inner in block.walk()]
    ours = {"RMSNorm", "Experts"} if module == "OwnRouter" else {"RMSNorm", "GatedFeedForward"}
    assert ours <= {inner.block for inner in inside}
    assert module in {inner.arguments["module"] for inner in inside if inner.block.startswith("Lifted")}
    assert {block.proof.status for block in package.spec.blocks()} == {"proven", "lifted"}
    text = (tmp_path / "made" / "lifted.py").read_text()
    assert all(word in text for word in words)
    assert "# lifted from modeling_own.py:" in text
    assert "Copyright 2025 Nobody in particular." in text
    assert str(tmp_path) not in text
    assert "no_grad" not in text  # its own code would train nothing through it
    assert "past_key_values.update" not in text
    assert onboard("check", tmp_path / "made")[1]["differences"] == []

    rows = [{"prompt": "hi", "completion": f" row {n}"} for n in range(40)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = "--set train.mode=full --set train.steps=8 --set optimizer.lr=1e-2 --set data.max_length=64"
    command = f"train made --data data.jsonl --run run --json {settings} --set optimizer.warmup=0"
    trained = runtime(tmp_path, command)
    assert trained["loss_last"] < trained["loss_first"]
    runtime(tmp_path, "export run -o out --json")
    before, after = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    assert all(bool((before[name] != after[name]).any()) for name in before)


def runtime(folder, command):
    binary = Path(sys.executable).with_name("runtime")
    made = subprocess.run([binary, *command.split()], cwd=folder, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return json.loads(made.stdout.splitlines()[-1])
