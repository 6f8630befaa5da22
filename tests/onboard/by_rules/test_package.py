"""A package that was made without a reference says so everywhere, and is trained only where that is asked for."""

import io
import json
import sys

import pytest
import tiny
import torch
from examples import write_examples

from dayzero.onboard import cli
from dayzero.onboard.by_rules import NOTICE
from dayzero.runtime import launch
from dayzero.runtime.errors import InputError
from dayzero.runtime.job import prepare
from dayzero.runtime.metrics import read_metrics
from dayzero.runtime.package import load_package
from dayzero.runtime.spec import ModelSpec


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint of a model that nothing knows, with a tokenizer, and examples."""
    folder = tmp_path_factory.mktemp("novel")
    tiny.make("qwen3_moe", folder / "novel", num_hidden_layers=2)
    config = json.loads((folder / "novel" / "config.json").read_text())
    renamed = {**config, "architectures": ["NovelForCausalLM"], "model_type": "novel"}
    (folder / "novel" / "config.json").write_text(json.dumps(renamed))
    write_examples(folder / "train.jsonl", 20, seed=0)
    return folder


def onboard(capsys, monkeypatch, *arguments):
    """(exit code, standard output, the object of its last line)."""
    monkeypatch.setattr(sys, "argv", ["onboard", *map(str, arguments), "--json"])
    capsys.readouterr()
    with pytest.raises(SystemExit) as ended:
        cli.main()
    out = capsys.readouterr().out
    return ended.value.code or 0, out, json.loads(out.splitlines()[-1])


@pytest.fixture(scope="module")
def ran(folder):
    """What `onboard` said of it, and where the package is."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(folder)
        capture = io.StringIO()
        monkeypatch.setattr(sys, "stdout", capture)
        monkeypatch.setattr(sys, "argv", ["onboard", "novel", "--json"])
        with pytest.raises(SystemExit) as ended:
            cli.main()
    return ended.value.code, capture.getvalue(), folder / "generated" / "novel"


def test_the_verdict_and_the_first_lines_say_it(ran):
    code, out, package = ran
    result = json.loads(out.splitlines()[-1])
    assert code == 1
    assert out.startswith(NOTICE)
    spec = ModelSpec.model_validate_json((package / "spec.json").read_text())
    assert (result["ok"], result["verdict"]) == (False, "UNVERIFIED")
    assert result["blocks"] == {"proven": 0, "lifted": 0, "unverified": len(spec.blocks())}
    assert {name: rung["verdict"] for name, rung in result["rungs"].items()} == {
        "L0": "PASS", "L1": "UNVERIFIED", "L2": "UNVERIFIED"
    }  # fmt: skip
    assert result["rungs"]["L2"]["where"] == "no reference: transformers has no model_type 'novel'"
    report = (package / "REPORT.md").read_text()
    assert report.splitlines()[0] == f"**{NOTICE}**"
    assert "queries and keys are normed before they turn (mixer of layers 0-1)" in report
    assert "inf" not in report
    page = (package / "report.html").read_text()
    assert page.index("UNVERIFIED: nothing of this model") < page.index("<h1>")
    model = (package / "model.py").read_text()
    assert "# model.layers.{layer}.self_attn: UNVERIFIED" in model
    assert "proven" not in model
    assert load_package(package).verdict == "UNVERIFIED"


def test_it_is_as_generated_and_aligned_again(ran, capsys, monkeypatch):
    package = ran[2]
    before = {file.name: file.read_bytes() for file in package.iterdir() if file.is_file()}
    assert onboard(capsys, monkeypatch, "check", package)[0] == 0
    code, _, result = onboard(capsys, monkeypatch, "align", package)
    assert (code, result["verdict"], result["blocks"]["proven"]) == (1, "UNVERIFIED", 0)
    assert {file.name: file.read_bytes() for file in package.iterdir() if file.is_file()} == before


def test_generate_alone_ends_with_1_too(folder, capsys, monkeypatch):
    code, out, result = onboard(capsys, monkeypatch, "generate", folder / "novel", "-o", folder / "out")
    assert (code, result["verdict"], result["rungs"]) == (1, "UNVERIFIED", {})
    assert out.startswith(NOTICE)
    with pytest.raises(InputError, match="UNVERIFIED package"):  # although no rung says so
        prepare(folder / "out" / "novel", data=folder / "train.jsonl", eval_data=None, run=folder / "no", world=1)


def test_training_takes_an_explicit_word(ran, folder, capsys, monkeypatch):
    package = ran[2]
    settings = ["train.steps=2", "train.precision=fp32", "data.max_length=96", "data.tokens_per_rank=128"]
    given = {"data": folder / "train.jsonl", "eval_data": None, "world": 1}
    with pytest.raises(InputError, match=r"--set train\.allow_unverified=true"):
        prepare(package, run=folder / "refused", overrides=settings, **given)
    assert not (folder / "refused").exists()
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    job = prepare(package, run=folder / "run", overrides=[*settings, "train.allow_unverified=true"], **given)
    launch.run(job, 1)
    torch.use_deterministic_algorithms(False)
    assert "WARNING: this package is UNVERIFIED" in capsys.readouterr().out
    assert [record["step"] for record in read_metrics(folder / "run") if "loss" in record] == [1, 2]
