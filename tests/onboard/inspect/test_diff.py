"""`onboard inspect A --diff B`: what changed between two releases."""

import json
import random
import sys
import time

import pytest
import skeleton
from rich.console import Console

from dayzero.onboard import cli
from dayzero.onboard.checkpoint import read_checkpoint
from dayzero.onboard.inspect.classify import classify
from dayzero.onboard.inspect.diff import diff_checkpoints
from dayzero.onboard.inspect.table import print_diff


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
    assert by_kind["-"] == set()
    (renamed,) = found.renamed
    assert (renamed.before, renamed.after, renamed.prefix) == ("shared_experts", "shared_expert", False)
    assert renamed.count == 3 * 26
    assert [pattern.split("{layer}.")[-1] for pattern in renamed.patterns] == [
        f"block_sparse_moe.shared_experts.{name}_proj.weight" for name in ("down", "gate", "up")
    ]
    assert ("block_sparse_moe.experts.{expert}.w2.weight", 256, "27", "0-255", "", "BF16 [2304, 1024]") in by_kind["+"]
    counts = {kind: sum(row[1] for row in rows) for kind, rows in by_kind.items()}
    assert counts == {"~": 20 + 26 * 256, "-": 0, "+": len(layer)}
    assert found.totals["tensors"] == (20493, 20493 + len(layer))
    assert found.totals["mixer layers"][1] == {"linear": 20, "latent": 8}


@pytest.mark.parametrize(
    ("old", "new", "before", "after"),
    [
        ("model.", "language_model.model.", "", "language_model."),
        ("model.", "model.language_model.", "model.", "model.language_model."),
        ("model.", "", "model.", ""),
        ("model.", "trunk.", "model.", "trunk."),
    ],
)
def test_a_prefix_is_one_line_however_many_names_it_is(release, old, new, before, after):
    listed = [
        (new + name.removeprefix(old) if name.startswith(old) else name, shape, dtype)
        for name, shape, dtype in skeleton.tensors("Kimi-Linear-48B-A3B")
    ]
    count = sum(name.startswith(old) for name in release.headers)
    found = diff(release, skeleton.checkpoint("Kimi-Linear-48B-A3B", listed))
    (renamed,) = found.renamed
    assert (renamed.before, renamed.after, renamed.prefix, renamed.count) == (before, after, True, count)
    assert [found.added, found.removed, found.changed] == [[], [], []]
    assert not found.same


def test_a_renamed_tensor_that_changed_is_a_change_too(release):
    """Under a new prefix, one also has another dtype, one is gone, and one is new."""

    def changed(tensor):
        name, shape, dtype = tensor
        return f"x.{name}", shape, "F32" if name.endswith("layers.3.input_layernorm.weight") else dtype

    listed = [changed(tensor) for tensor in skeleton.tensors("Kimi-Linear-48B-A3B")]
    gone = next(name for name, *_ in listed if name.endswith("layers.5.input_layernorm.weight"))
    listed = [*(tensor for tensor in listed if tensor[0] != gone), ("x.more", [3], "F32")]
    found = diff(release, skeleton.checkpoint("Kimi-Linear-48B-A3B", listed))
    assert [(r.before, r.after, r.count) for r in found.renamed] == [("", "x.", len(release.headers) - 2)]
    assert [(c.pattern, c.layers, c.before, c.after) for c in found.changed] == [
        ("x.model.layers.{layer}.input_layernorm.weight", "3", "BF16 [2304]", "F32 [2304]")
    ]
    assert [(c.pattern, c.layers) for c in found.removed] == [("model.layers.{layer}.input_layernorm.weight", "5")]
    assert [c.pattern for c in found.added] == ["x.more"]


def test_names_that_do_not_tell_which_is_which_are_removed_and_added():
    one = [(f"h.{layer}.{name}.weight", [4, 4], "F32") for layer in range(3) for name in ("a", "b")]
    two = [(name.replace("a.", "x.").replace("b.", "y."), shape, dtype) for name, shape, dtype in one]
    found = diff(*(skeleton.checkpoint("gpt-oss-20b", listed) for listed in (one, two)))
    assert found.renamed == []
    assert [(c.pattern, c.count) for c in found.removed] == [(f"h.{{layer}}.{n}.weight", 3) for n in "ab"]
    assert [(c.pattern, c.count) for c in found.added] == [(f"h.{{layer}}.{n}.weight", 3) for n in "xy"]
    told = [(name, [4, 4 + (".b." in name)], dtype) for name, _, dtype in one]  # by their shapes they do
    other = [(name.replace("a.", "x.").replace("b.", "y."), shape, dtype) for name, shape, dtype in told]
    found = diff(*(skeleton.checkpoint("gpt-oss-20b", listed) for listed in (told, other)))
    assert {(r.before, r.after, r.count) for r in found.renamed} == {("a", "x", 3), ("b", "y", 3)}
    assert [found.added, found.removed] == [[], []]


def test_a_component_that_is_put_between():
    one = [(f"h.{layer}.{name}.weight", [4, size], "F32") for layer in range(3) for name, size in (("q", 3), ("k", 5))]
    two = [(name.replace(".q", ".attn.q").replace(".k", ".attn.k"), shape, dtype) for name, shape, dtype in one]
    found = diff(*(skeleton.checkpoint("gpt-oss-20b", listed) for listed in (one, two)))
    assert {(r.before, r.after, r.count) for r in found.renamed} == {("q", "attn.q", 3), ("k", "attn.k", 3)}


def test_many_names_without_order_are_compared_in_bounded_time():
    draw = random.Random(0)
    listed = [
        [(f"{draw.randrange(10**6)}x.{draw.randrange(10**6)}y.w{n}", [2], "F32") for n in range(3000)] for _ in range(2)
    ]
    started = time.process_time()
    found = diff(*(skeleton.checkpoint("gpt-oss-20b", each) for each in listed))
    assert sum(c.count for c in found.added) + sum(r.count for r in found.renamed) == 3000
    assert time.process_time() - started < 20


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


def test_what_a_rename_looks_like(release, capsys):
    listed = [(f"language_model.{name}", shape, dtype) for name, shape, dtype in skeleton.tensors("gpt-oss-20b")]
    one, two = skeleton.checkpoint("gpt-oss-20b"), skeleton.checkpoint("gpt-oss-20b", listed)
    print_diff(Console(width=100), diff(one, two))
    count = len(one.headers)
    assert f"> renamed (no prefix) -> language_model.\n    {count:,} tensors of " in capsys.readouterr().out


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
