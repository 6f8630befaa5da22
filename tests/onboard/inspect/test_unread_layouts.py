"""Quantised layouts that are not read: named as what they are, in a run and by inspect."""

import json
import shutil
from pathlib import Path

import onboarded
import pytest
import skeleton

from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.inspect.classify import classify
from dayzero.onboard.inspect.unread_layouts import READ, unread_layouts
from dayzero.onboard.prove.proven import NotProven
from dayzero.onboard.specify_checkpoint import specify_checkpoint
from dayzero.runtime.quantisation import FORMATS

IN, OUT, GROUP = 128, 64, 32
LAYOUTS = {
    "GPTQ": {
        "qweight": ([IN // 8, OUT], "I32"),
        "qzeros": ([IN // GROUP, OUT // 8], "I32"),
        "scales": ([IN // GROUP, OUT], "F16"),
        "g_idx": ([IN], "I32"),
    },
    "AWQ": {
        "qweight": ([IN, OUT // 8], "I32"),
        "qzeros": ([IN // GROUP, OUT // 8], "I32"),
        "scales": ([IN // GROUP, OUT], "F16"),
    },
    "asymmetric": {
        "weight_packed": ([OUT, IN // 8], "I32"),
        "weight_scale": ([OUT, IN // GROUP], "BF16"),
        "weight_zero_point": ([OUT // 8, IN // GROUP], "I32"),
    },
    "bitsandbytes": {"weight": ([OUT * IN // 2, 1], "U8"), "weight.absmax": ([IN], "F32")},
}


def quantised(layout, folder):
    """The tiny model, the gate projections stored in the layout."""
    source = onboarded.checkpoint("llama")
    listed = []
    for name, header in read_checkpoint(source).headers.items():
        module = name.removesuffix("weight")
        if module.endswith("gate_proj."):
            listed += [(module + part, shape, dtype) for part, (shape, dtype) in LAYOUTS[layout].items()]
        else:
            listed.append((name, list(header.shape), header.dtype))
    config = json.loads((source / "config.json").read_text())
    return skeleton.write(listed, folder, {**config, "quantization_config": {"quant_method": "x"}})


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_layout_is_named_and_what_is_read(layout, tmp_path):
    checkpoint = read_checkpoint(quantised(layout, tmp_path / "checkpoint"))
    with pytest.raises(NotProven) as error:
        specify_checkpoint(checkpoint, "x", {}, lambda line: None)
    (item,) = error.value.unproven
    code = next(iter(LAYOUTS[layout]))
    assert item.where == f"model.layers.0.mlp.gate_proj.{code} and 2 more"
    assert layout in item.why
    assert "not read here" in item.why
    assert all(name in item.why for name in READ)
    findings = [finding for finding in classify(checkpoint).findings if finding.kind == "damage"]
    assert [layout in finding.what for finding in findings].count(True) == 1
    assert not any("no scales that are known here" in finding.what for finding in findings)


def test_the_list_of_what_is_read_is_all_of_it():
    assert set(READ) == set(FORMATS)


def test_bits_and_neighbours_are_told():
    (told,) = unread_layouts(read_checkpoint_like("AWQ"))
    assert told == "int32 words of 4 bits over the outputs with qzeros and scales, as AWQ writes them"
    (told,) = unread_layouts(read_checkpoint_like("GPTQ"))
    assert told == "int32 words over the inputs with qzeros and scales and g_idx, as GPTQ writes them"


def read_checkpoint_like(layout):
    listed = [(f"a.{part}", shape, dtype) for part, (shape, dtype) in LAYOUTS[layout].items()]
    return skeleton.checkpoint("gpt-oss-20b", listed).headers


def test_formats_that_are_read_are_none_of_these(tmp_path):
    for name in ("Kimi-Linear-48B-A3B", "gpt-oss-20b"):
        assert unread_layouts(skeleton.checkpoint(name).headers) == {}
    folder = Path(shutil.copytree(onboarded.checkpoint("llama"), tmp_path / "plain"))
    assert unread_layouts(read_checkpoint(folder).headers) == {}
