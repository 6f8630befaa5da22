"""L0: what is stored goes in and out again, bit for bit."""

from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from dayzero.onboard.align import coverage_rung
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.runtime.weights import Rule, Stored


def test_whole_numbers_go_in_and_out_as_they_are(tmp_path):
    """A multiplier of a hash has more digits than a floating-point number keeps."""
    numbers = {"held": torch.tensor([2**62 + 1, -3]), "small": torch.tensor([0.1], dtype=torch.bfloat16)}
    save_file(numbers, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    rules = [SimpleNamespace(build=lambda name=name: Rule(f"ours.{name}", Stored(name))) for name in numbers]
    ledger: Any = SimpleNamespace(unaccounted=[], groups=[])
    spec: Any = SimpleNamespace(rules=rules)
    found, hashes = coverage_rung(read_checkpoint(tmp_path), ledger, spec)
    assert (found.verdict, found.worst) == ("PASS", 0.0), found.where
    assert hashes.keys() == {"ours.held", "ours.small"}


def test_a_tensor_that_holds_nan_is_named(tmp_path):
    """Its payload is one that arithmetic does not keep."""
    odd = torch.tensor([0x3F80, 0x7F81], dtype=torch.int16).view(torch.bfloat16)
    save_file({"held": odd}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text("{}")
    ledger: Any = SimpleNamespace(unaccounted=[], groups=[])
    spec: Any = SimpleNamespace(rules=[SimpleNamespace(build=lambda: Rule("ours.held", Stored("held")))])
    found, _ = coverage_rung(read_checkpoint(tmp_path), ledger, spec)
    assert (found.verdict, found.where) == ("FAIL", "held holds NaN: is this file whole?")
