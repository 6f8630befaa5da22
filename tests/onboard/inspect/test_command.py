"""`onboard inspect`, its table, its picture, and what it says about one tensor."""

import functools
import json
import subprocess
import sys

import pytest
import skeleton
from html_balance import Balance
from rich.console import Console

from dayzero.onboard import cli
from dayzero.onboard.inspect.classify import classify
from dayzero.onboard.inspect.html import render_inspection
from dayzero.onboard.inspect.lookup import look_up
from dayzero.onboard.inspect.table import print_ledger
from dayzero.onboard.inspect.tensor_names import counted
from dayzero.runtime.errors import InputError

HEAVY = {"Kimi-K3"}
names = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in HEAVY else []) for name in skeleton.NAMES]
)


@functools.cache
def checkpoint(name):
    return skeleton.checkpoint(name)


@functools.cache
def ledger(name):
    return classify(checkpoint(name))


# --- one tensor -------------------------------------------------------------------------------------------------------


def test_any_name_is_answered():
    source, held = checkpoint("DeepSeek-V3.2"), ledger("DeepSeek-V3.2")
    expert = look_up(held, source, "model.layers.60.mlp.experts.255.up_proj.weight")
    assert (expert["role"], expert["part"], expert["format"]) == ("expert", "text", "fp8_block")
    assert expert["stored_as"]["scale"] == "model.layers.60.mlp.experts.255.up_proj.weight_scale_inv"
    assert expert["end"] - expert["start"] == expert["bytes"] == 2048 * 7168
    further = look_up(held, source, "model.layers.61.mlp.experts.0.up_proj.weight_scale_inv")
    assert (further["part"], further["fate"]) == ("mtp", "carried")
    assert further["part_of"] == "model.layers.61.mlp.experts.0.up_proj.weight"
    assert further["group"]["layers"] == "61"
    header = source.headers[further["name"]]
    assert (further["dtype"], further["shape"], further["file"]) == ("F32", [16, 56], header.file)


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("model.layers.7.mlp.experts.12.up_proj.wieght", "model.layers.7.mlp.experts.12.up_proj.weight"),
        ("model.layers.99.mlp.experts.12.up_proj.weight", "model.layers.60.mlp.experts.12.up_proj.weight"),
        ("layers.5.self_attn.kv_b_proj.weight", "model.layers.5.self_attn.kv_b_proj.weight"),
        ("lm_head", "lm_head.weight"),
    ],
)
def test_a_miss_names_what_is_near(wrong, right):
    with pytest.raises(InputError, match="no such tensor among 92425") as error:
        look_up(ledger("DeepSeek-V3.2"), checkpoint("DeepSeek-V3.2"), wrong)
    assert right in error.value.hint


# --- what is shown ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@names
def test_the_table_fits_80_columns(name, capsys):
    console = Console(width=80)
    print_ledger(console, checkpoint(name), ledger(name))
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= 80
    for group in ledger(name).groups:
        if group.part_of is None and len(group.pattern.rsplit(".", 2)[-1]) < 30:
            assert group.pattern.rsplit(".", 2)[-1] in out


@names
def test_the_picture_is_whole_and_refers_to_nothing_outside(name):
    text = render_inspection("<b>&{{ 7 * 7 }}", ledger(name))
    page = Balance()
    page.feed(text)
    assert (page.open, page.problems, page.references) == ([], [], [])
    assert "<b>" not in text.split("<body>")[0].split("<h1>")[1].split("</h1>")[0]
    assert "{{ 7 * 7 }}" in text
    layers = sum(len(counted(run.layers)) for run in ledger(name).layers)
    assert text.count(": mixer ") == text.count(": feed-forward ") == layers
    assert len(text) < 500_000


@pytest.fixture
def onboard(capsys, monkeypatch, tmp_path):
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["onboard", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        out, err = capsys.readouterr()
        return ended.value.code or 0, out, err

    return run


def test_the_command(onboard, tmp_path):
    folder = skeleton.make("gpt-oss-20b", tmp_path / "checkpoint")
    code, out, _ = onboard("inspect", folder, "--json")
    result = json.loads(out)
    assert (code, result["verdict"], result["formats"].keys()) == (0, "PASS", {"mxfp4_blocks"})
    assert len(result["groups"]) == len(ledger("gpt-oss-20b").groups)
    code, out, _ = onboard("inspect", folder, "--html", tmp_path / "cwd" / "picture.html")
    assert code == 0
    assert "picture.html" in out
    assert (tmp_path / "cwd" / "picture.html").read_text().startswith("<!doctype html>")
    code, out, _ = onboard("inspect", folder, "--tensor", "model.layers.3.mlp.router.bias", "--json")
    assert json.loads(out)["tensor"]["role"] == "router bias"
    code, out, _ = onboard("inspect", folder, "--tensor", "model.layers.3.mlp.router.bias")
    assert "model.layers.{layer}.mlp.router.bias, 24 tensors" in out
    code, out, err = onboard("inspect", folder, "--tensor", "nothing.like.it")
    assert (code, out) == (2, "")
    assert "no such tensor" in err
    code, _, err = onboard("inspect", folder, "--html", tmp_path / "nowhere" / "x.html")
    assert (code, "nowhere" in err) == (2, True)
    code, _, err = onboard("inspect", folder, "--html", "x.html", "--tensor", "y")
    assert (code, "one of them" in err) == (2, True)


def test_it_needs_no_torch(tmp_path):
    """Which takes longer to import than half a million headers take to read."""
    folder = skeleton.make("gpt-oss-20b", tmp_path / "checkpoint")
    code = "import sys; from dayzero.onboard.cli import app; app(['inspect', sys.argv[1]], standalone_mode=False); "
    code += "print([name for name in ('torch', 'transformers', 'langchain', 'numpy') if name in sys.modules])"
    made = subprocess.run([sys.executable, "-c", code, folder], capture_output=True, text=True, check=True)
    assert made.stdout.splitlines()[-1] == "[]"
