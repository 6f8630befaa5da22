"""`onboard inspect A --diff B`: what changed between two releases."""

import json
import sys

import pytest
import skeleton

from dayzero.onboard import cli
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.classify import classify
from dayzero.onboard.diff import diff_checkpoints


def diff(one, two):
    return diff_checkpoints(one, two, (classify(one), classify(two)))


@pytest.fixture(scope="module")
def release():
    return skeleton.checkpoint("Kimi-Linear-48B-A3B")


def test_a_checkpoint_and_itself(release):
    found = diff(release, release)
    assert found.same
    assert (found.moved, found.totals) == (0, {})


def test_added_removed_reshaped_and_redtyped_by_pattern(release):
    """Each change is one line with its ranges, however many tensors it is."""

    def changed(tensor):
        name, shape, dtype = tensor
        if name.endswith("A_log"):
            return name, [32], dtype
        if ".experts." in name and ".w1." in name:
            return name, shape, "F8_E4M3"
        return name.replace("shared_experts", "shared_expert"), shape, dtype

    listed = [changed(tensor) for tensor in skeleton.tensors("Kimi-Linear-48B-A3B")]
    layer = [(name, shape, dtype) for name, shape, dtype in listed if name.startswith("model.layers.26.")]
    listed += [(name.replace("layers.26.", "layers.27."), shape, dtype) for name, shape, dtype in layer]
    found = diff(release, skeleton.checkpoint("Kimi-Linear-48B-A3B", listed))
    by_kind = {
        kind: {(c.pattern.split("{layer}.")[-1], c.count, c.layers, c.experts, c.before, c.after) for c in changes}
        for kind, changes in (("+", found.added), ("-", found.removed), ("~", found.changed))
    }
    linear = next(change.layers for change in found.changed if change.pattern.endswith("A_log"))
    assert by_kind["~"] == {
        ("self_attn.A_log", 20, linear, "", "F32 [1, 1, 32, 1]", "F32 [32]"),
        (
            "block_sparse_moe.experts.{expert}.w1.weight",
            26 * 256,
            "1-26",
            "0-255",
            "BF16 [1024, 2304]",
            "F8_E4M3 [1024, 2304]",
        ),
    }
    assert len(by_kind["-"]) == 3
    assert {row[2] for row in by_kind["-"]} == {"1-26"}
    assert ("block_sparse_moe.experts.{expert}.w2.weight", 256, "27", "0-255", "", "BF16 [2304, 1024]") in by_kind["+"]
    counts = {kind: sum(row[1] for row in rows) for kind, rows in by_kind.items()}
    assert counts == {"~": 20 + 26 * 256, "-": 3 * 26, "+": 3 * 26 + len(layer)}
    assert found.totals["tensors"] == (20493, 20493 + len(layer))
    assert found.totals["mixer layers"][1] == {"linear": 20, "latent": 8}


def test_config_and_files(tmp_path):
    one = skeleton.make("gpt-oss-20b", tmp_path / "one")
    two = skeleton.make("gpt-oss-20b", tmp_path / "two", swiglu_limit=8.0, rope_theta=..., novel={"a": {"b": [1]}})
    for folder, text in ((one, "a"), (two, "b")):
        (folder / "tokenizer.json").write_text(f'"{text}"')
        (folder / "merges.txt").write_text("same")
    (one / "vocab.json").write_text("{}")
    (two / "modeling_new.py").write_text("open('sentinel', 'w')\n")
    found = diff(read_checkpoint(one), read_checkpoint(two))
    assert found.config == {"swiglu_limit": (7.0, 8.0), "rope_theta": (150000, None), "novel.a.b": (None, [1])}
    assert found.files == {"tokenizer.json": "changed", "vocab.json": "removed", "modeling_new.py": "added"}
    assert [found.added, found.removed, found.changed] == [[], [], []]


def test_tensors_in_other_files_are_no_change(tmp_path):
    listed = skeleton.tensors("gpt-oss-20b")
    config = skeleton.config("gpt-oss-20b")
    one = skeleton.write(listed, tmp_path / "one", config, shard_bytes=3_000_000_000)
    two = skeleton.write(listed, tmp_path / "two", config, shard_bytes=4_000_000_000)
    found = diff(read_checkpoint(one), read_checkpoint(two))
    assert found.same
    assert found.moved > 300


def test_the_command(tmp_path, monkeypatch, capsys):
    one = skeleton.make("gpt-oss-20b", tmp_path / "one")
    two = skeleton.make("gpt-oss-20b", tmp_path / "two", limit=float("inf"))

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["onboard", "inspect", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        return ended.value.code or 0, *capsys.readouterr()

    code, out, _ = run(one, "--diff", two, "--json")
    result = json.loads(out)
    assert (code, result["same"], result["diff"]["config"]) == (0, False, {"limit": [None, "inf"]})
    code, out, _ = run(one, "--diff", two)
    assert (code, out) == (0, "config limit: None -> inf\n")
    code, out, _ = run(one, "--diff", one)
    assert (code, out) == (0, "the same tensors, config and files\n")
    code, out, err = run(one, "--diff", tmp_path / "nowhere")
    assert (code, out, "no such folder" in err) == (2, "", True)
