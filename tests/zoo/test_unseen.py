"""A layer never seen is lifted, and it alone: the rest is proven, the model trains, and the export has its names."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
from safetensors.torch import load_file
from zoo import unseen

from dayzero.onboard.oracle import sandbox
from dayzero.runtime.package import load_package

# What of the package is the checkpoint's own code, what must be proven beside it, and why there is no block for it.
LIFTED = {
    "mixer": (
        "RunningSum",
        {"RMSNorm", "MixtureOfExperts", "Experts"},
        "model.tiers.{layer}.mixer (mixer of layers 0-1): no block has parameters as into, gate, back; "
        "runs cumsum, atan, cos",
    ),
    "router": (
        "NearestRouter",
        {"RMSNorm", "GroupedQueryAttention", "MixtureOfExperts", "Experts"},
        "model.tiers.{layer}.mixture (ffn of layers 0-1): like MixtureOfExperts, but for its router (of router); "
        "runs topk, atan",
    ),
    "residual": (
        "Layer",
        {"RMSNorm", "GroupedQueryAttention", "MixtureOfExperts", "Experts"},
        "model.tiers.{layer} (layers 0-1): input of model.tiers.0.between is no sum of earlier values "
        "(x, before, mixer)",
    ),
}

ODD = ["router", pytest.param("mixer", marks=pytest.mark.zoo), pytest.param("residual", marks=pytest.mark.zoo)]


def command(binary, folder, line):
    made = subprocess.run(
        [Path(sys.executable).with_name(binary), *line.split(), "--json"], cwd=folder, capture_output=True, text=True
    )
    assert made.returncode == 0, made.stdout[-2000:] + made.stderr[-2000:]
    return json.loads(made.stdout.splitlines()[-1])


@pytest.mark.slow
@pytest.mark.parametrize("odd", ODD)
def test_a_layer_never_seen_is_lifted_alone_trains_and_is_exported(odd, tmp_path):
    tokenizer = tiny.make("llama", tmp_path / "tokenizer")
    vocabulary = json.loads((tokenizer / "config.json").read_text())["vocab_size"]
    checkpoint = unseen.make(tmp_path / "own", odd, vocab_size=vocabulary)
    for file in tokenizer.glob("*token*.json"):
        shutil.copy(file, checkpoint)
    unsafe = "--unsafe-no-sandbox" if sandbox.why_not() else ""
    result = command("onboard", tmp_path, f"run own -o . --name made --trust-remote-code {unsafe}")
    assert result["verdict"] == "PASS"
    module, proven, why = LIFTED[odd]
    spec = load_package(tmp_path / "made").spec
    inner = [block for outer in spec.blocks() for block in outer.walk()]
    lifted = {block.arguments["module"].partition("_around_")[0] for block in inner if "module" in block.arguments}
    assert lifted == {module}
    assert {block.block for block in inner} >= proven
    for report in ("REPORT.md", "report.html"):
        assert why in (tmp_path / "made" / report).read_text()
    rows = [{"prompt": "hi", "completion": f" row {n}"} for n in range(20)]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    settings = "--set train.mode=full --set train.steps=2 --set optimizer.lr=1e-2 --set optimizer.warmup=0"
    command("runtime", tmp_path, f"train made --data data.jsonl --run run {settings}")
    command("runtime", tmp_path, "export run -o out")
    before, after = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    assert {n: (t.dtype, t.shape) for n, t in before.items()} == {n: (t.dtype, t.shape) for n, t in after.items()}
    changed = [name for name in before if bool((before[name] != after[name]).any())]
    assert any(".mixture.router." in name for name in changed)
    assert any(".mixer." in name for name in changed)
