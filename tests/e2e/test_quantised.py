"""A checkpoint with MXFP4 experts: onboarded, trained, and stored in its own format again."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import tiny
import torch
from safetensors.torch import load_file, save_file

from dayzero.runtime.quantisation import FORMATS, decode, encode

FORMAT = FORMATS["mxfp4_packed"]


def run(folder: Path, command: str) -> subprocess.CompletedProcess:
    name, *words = command.split()
    binary = Path(sys.executable).with_name(name)
    return subprocess.run([binary, *words], cwd=folder, capture_output=True, text=True, timeout=200)


def quantise(file: Path) -> None:
    """Replaces every expert's weight by codes and scales."""
    stored = {}
    for name, tensor in load_file(file).items():
        if ".experts." in name:
            rows, columns = tensor.shape
            like = {
                "packed": torch.zeros(rows, columns // 2, dtype=torch.uint8),
                "scale": torch.zeros(rows, columns // 32, dtype=torch.uint8),
            }
            parts, _ = encode(FORMAT, tensor.float(), like)
            stored |= {f"{name}_{role}": part for role, part in parts.items()}
        else:
            stored[name] = tensor
    save_file(stored, file, metadata={"format": "pt"})


def experts(file: Path) -> dict[str, torch.Tensor]:
    """What the experts' codes stand for."""
    tensors = load_file(file)
    names = [name.removesuffix("_packed") for name in tensors if name.endswith("weight_packed")]
    return {n: decode(FORMAT, {"packed": tensors[f"{n}_packed"], "scale": tensors[f"{n}_scale"]}) for n in names}


@pytest.mark.slow
def test_trained_and_stored_in_its_own_format(tmp_path):
    source = tiny.make("mixtral", tmp_path / "source", dtype=torch.bfloat16, hidden_size=64, intermediate_size=96)
    quantise(source / "model.safetensors")
    config = json.loads((source / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized"}
    (source / "config.json").write_text(json.dumps(config))
    data = [
        {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": f"row {n}"}]}
        for n in range(40)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, data)))

    onboarded = run(tmp_path, "onboard source --json")
    assert onboarded.returncode == 0, onboarded.stderr
    verdict = json.loads(onboarded.stdout.splitlines()[-1])
    assert {name: rung["verdict"] for name, rung in verdict["rungs"].items()} == dict.fromkeys(
        ("L0", "L1", "L2"), "PASS"
    )

    settings = "--set train.mode=full --set train.steps=6 --set optimizer.lr=3e-2 --set optimizer.warmup=0"
    trained = run(
        tmp_path, f"runtime train generated/source --data data.jsonl --run run {settings} --set data.max_length=64"
    )
    assert trained.returncode == 0, trained.stderr

    refused = run(tmp_path, "runtime export run -o out")
    assert refused.returncode == 2
    assert "--requantise" in refused.stderr
    assert not (tmp_path / "out").exists()

    done = run(tmp_path, "runtime export run -o out --requantise --json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["requantised"] == 3 * 6 * 3
    assert 0 < report["worst_rounding"] < 0.15
    before, after = experts(source / "model.safetensors"), experts(tmp_path / "out" / "model.safetensors")
    headers = [
        {n: (t.dtype, t.shape) for n, t in load_file(f / "model.safetensors").items()}
        for f in (source, tmp_path / "out")
    ]
    assert headers[0] == headers[1]
    moved = [float((after[n].float() - before[n].float()).norm() / before[n].float().norm()) for n in before]
    assert all(change < 1.0 for change in moved)
    assert max(moved) > 0.001
