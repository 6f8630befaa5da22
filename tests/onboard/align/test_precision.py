"""What the reference computes in float32 in a bfloat16 run, and a block that does it in bfloat16 is told of."""

import json
from unittest import mock

import onboarded
import torch
from torch import nn
from zoo import mutants

from dayzero.onboard.align import Alignment
from dayzero.onboard.align.climb import load_shrunk
from dayzero.onboard.align.precision import compared, float32_steps
from dayzero.onboard.prove.trace import trace_modules
from dayzero.runtime.nn import Router


class Gate(nn.Module):
    """A score of float32 logits, or of logits as wide as what is read."""

    def __init__(self, wide):
        super().__init__()
        self.wide = wide
        self.into, self.score = nn.Linear(8, 8, bias=False), nn.Linear(8, 5, bias=False)

    def forward(self, x):
        x = self.into(x)
        if self.wide:
            return nn.functional.linear(x.float(), self.score.weight.float()).sigmoid()
        return self.score(x).sigmoid()


def traced(wide):
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).bfloat16()
    gate = Gate(wide).bfloat16()
    return trace_modules(gate, lambda: gate(x))


def test_steps_are_told_apart_by_dtype_and_products_by_their_columns():
    both = compared("gate", "Gate", traced(True)[""], traced(True)[""])
    assert (both.casts, both.steps, both.narrow) == (2, ["matmul", "sigmoid"], [])
    narrow = compared("gate", "Gate", traced(True)[""], traced(False)[""])
    assert narrow.narrow == ["matmul", "sigmoid"]
    assert compared("gate", "Gate", traced(False)[""], traced(True)[""]).steps == []
    assert [step.name for step in traced(False)["into"]] == ["t", "mm"]


def test_the_report_says_it_of_every_block():
    package = onboarded.get("mixtral", align=True).package
    lock = json.loads((package / "onboard.lock").read_text())
    entries = {entry.module: entry for entry in Alignment.model_validate(lock["alignment"]).float32}
    assert entries["model.layers.{layer}.mlp"].steps == ["div", "softmax", "topk"]
    assert entries["model.layers.{layer}.self_attn"].steps == ["softmax"]
    assert entries["model.norm"].steps == ["add", "mean", "pow", "rsqrt"]
    assert not any(entry.narrow for entry in entries.values())
    for name in ("REPORT.md", "report.html"):
        report = (package / name).read_text()
        said = "in bfloat16 the reference runs div, softmax, topk in float32 (1 cast to it); so does the block"
        assert said in report
        assert "Narrower than the reference" not in report


def test_a_router_that_is_narrower_than_the_reference_is_told(tmp_path):
    found = mutants.specified("mixtral")[1]
    with mock.patch.object(Router, "_into", lambda self, x: x):
        entries = float32_steps(load_shrunk(found, tmp_path), found.shrunk_config)
    assert {entry.module: entry.narrow for entry in entries if entry.narrow} == {
        "model.layers.{layer}.mlp": ["div", "softmax", "topk"]
    }


def test_a_stream_in_float32_is_told(tmp_path):
    found = mutants.specified("mamba2")[1]
    entries = {entry.module: entry for entry in float32_steps(load_shrunk(found, tmp_path), found.shrunk_config)}
    assert (entries["backbone.layers"].steps, entries["backbone.layers"].narrow) == (["add"], ["add"])
    assert not entries["backbone.layers.{layer}.mixer"].narrow
